"""`quest` with one set of pages for the query heads of a KV head, as a GQA kernel would load them."""

from rcq_cli.modes.quest import GroupLayer, Quest

MODE = Quest("quest-group", GroupLayer, "quest with one set of pages per KV head")
