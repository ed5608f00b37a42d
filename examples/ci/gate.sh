#!/bin/sh
# Judges the KV-cache mode in kv-cache.txt against the uncompressed cache; reports are there either way.
# One short context of the built-in model, so that it takes half a minute; name your own model and contexts.
set -eu
mkdir -p reports
exec rcq compare dense "$(cat kv-cache.txt)" --preset smoke --ctx 512 --expect naive=pass --out reports/runs \
  --json reports/rcq.json --junit reports/junit.xml --code-quality reports/code-quality.json
