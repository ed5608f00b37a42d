import numpy as np
import pytest

from rcq_cli.recas.stages import Rules, StageTracker

WORDS = ["\n", ".", "the", *(f"word{i}" for i in range(3, 200))]


def text_of(token):
    return WORDS[token]


def tracker(**changes):
    values = {"shortest_stage_tokens": 4, "common_share": 0.0} | changes
    return StageTracker(text_of, Rules(**values))


def test_units_end_after_sentences_newlines_and_at_their_longest():
    stages = tracker(unit_tokens=3, longest_stage_tokens=99)
    stages.read([3, 4, 1, 5, 6, 0, 7, 8, 9, 10])
    assert stages.units().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_without_text_units_are_blocks_of_sixteen():
    stages = StageTracker()
    stages.read(range(40))
    assert stages.units().tolist() == [i // 16 for i in range(40)]


def test_a_stage_ends_at_a_paragraph_but_not_before_its_shortest_length():
    stages = tracker(shortest_stage_tokens=6)
    stages.read([3, 0, 0, 4])
    assert stages.transitions == 0
    stages.read([5, 6, 0, 0, 7])
    assert stages.transitions == 1


def test_a_stage_ends_at_a_list_marker_and_at_a_cue_that_begins_a_sentence():
    texts = {0: "\n", 1: "a", 2: "- ", 3: ".", 4: " Then"}
    rules = Rules(shortest_stage_tokens=2, cues=("then",))
    stages = StageTracker(texts.__getitem__, rules)
    stages.read([1, 1, 0, 2])
    assert stages.transitions == 1
    stages.read([1, 1, 4])
    assert stages.transitions == 1
    stages.read([3, 4])
    assert stages.transitions == 2


def test_a_stage_ends_by_length_alone():
    stages = StageTracker(rules=Rules(longest_stage_tokens=50))
    stages.read([1] * 151)
    assert stages.transitions == 3


def test_the_link_of_a_unit_is_the_idf_share_of_its_words_that_return():
    # unit 0: words 10 11 12; unit 1: 13 14; next stage, unit 2: 10 15, unit 3: 16 17
    stages = tracker(longest_stage_tokens=9, least_link=0.5)
    stages.read([10, 11, 12, 1, 13, 14, 1, 0, 0])
    stages.read([10, 15, 1, 16, 17, 1, 0, 0, 0])
    idf = {word: np.log(5 / 2) for word in (11, 12)} | {10: np.log(5 / 3)}
    assert idf[10] / sum(idf.values()) < 0.3
    stages.read([3])
    assert stages.transitions == 2
    assert stages.links()[:3].tolist() == [0, 0, 0]
    again = tracker(longest_stage_tokens=9, least_link=0.2)
    again.read([10, 11, 12, 1, 13, 14, 1, 0, 0, 10, 15, 1, 16, 17, 1, 0, 0, 0, 3])
    links = again.links()
    assert links[:4].tolist() == [1, 1, 1, 1]
    assert links[4:7].tolist() == [0, 0, 0]


def test_a_unit_restated_within_its_own_stage_is_linked_when_that_stage_closes():
    stages = tracker(longest_stage_tokens=8)
    stages.read([20, 21, 1, 20, 21, 1, 22, 1])
    assert stages.links().max() == 0
    stages.read([30])
    assert stages.links()[:8].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]


def test_a_unit_does_not_link_to_itself():
    stages = tracker(longest_stage_tokens=8)
    stages.read([20, 20, 21, 21, 1, 22, 23, 1, 30])
    assert stages.links().max() == 0


def test_a_unit_counts_once_per_stage_and_again_in_the_next():
    stages = tracker(longest_stage_tokens=6)
    stages.read([20, 21, 1, 22, 23, 1])
    for _ in range(3):
        stages.read([20, 21, 1, 20, 21, 1])
    stages.read([30])
    # three later stages and none within its own
    assert stages.links()[:3].tolist() == [3, 3, 3]
    assert stages.links()[3:6].tolist() == [0, 0, 0]


def test_frequent_ids_and_short_texts_carry_no_content():
    stages = StageTracker(lambda i: "x" if i == 50 else f"word{i}", Rules(longest_stage_tokens=128))
    stages.read([*range(100, 227), 50])
    stages.read([50] * 128)
    stages.read([1])
    assert stages.links().max() == 0


@pytest.mark.parametrize("cuts", [(1,) * 90, (90,), (7, 33, 50)])
def test_links_do_not_depend_on_how_the_tokens_arrive(cuts):
    ids = np.random.default_rng(9).integers(0, 40, 90).tolist()
    whole = tracker(longest_stage_tokens=20)
    whole.read(ids)
    parts, start = tracker(longest_stage_tokens=20), 0
    for cut in cuts:
        parts.read(ids[start : start + cut])
        start += cut
    assert whole.links().max() > 0
    assert np.array_equal(whole.links(), parts.links())


def test_a_fork_goes_its_own_way():
    stages = tracker(longest_stage_tokens=8)
    stages.read([20, 21, 1, 20, 21, 1, 22, 1])
    twin = stages.fork()
    twin.read([30, 31])
    assert (stages.tokens, stages.transitions, stages.links().max()) == (8, 0, 0)
    assert (twin.tokens, twin.transitions, twin.links().max()) == (10, 1, 1)


def test_credit_links_a_unit_once():
    stages = tracker()
    stages.read([20, 21, 1, 22, 23])
    stages.credit(np.array([1, 1]))
    stages.credit(np.array([0]))
    assert stages.links().tolist() == [1, 1, 1, 0, 0]


def test_closing_counts_the_stage_once_however_often_it_is_asked():
    stages = tracker()
    stages.read([20, 21, 1, 22, 23, 1, 20, 21, 1])
    stages.close()
    stages.close()
    assert stages.transitions == 1
    assert stages.links().tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1]


# -- turns of a conversation --------------------------------------------------------------------------------

END = 199


def test_a_question_turn_is_a_stage_of_its_own_however_short():
    stages = StageTracker(text_of, Rules(), turn_ends=(END,))
    stages.read([30, 31, 32, 1, END, 40, 41, END])
    # the token that ends a turn belongs to it; the next one opens the stage
    assert stages.transitions == 1
    stages.read([50])
    assert stages.transitions == 2
    assert stages.units().tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 3]


def test_a_question_links_what_it_asks_for_and_not_what_stood_before_it():
    # a unit (20 21 22 .), a paragraph of two units (30 31 .) that repeat each other, then the question 20 21
    text = [20, 21, 22, 1, 0, 0, *[30, 31, 1], *[30, 31, 1], END, 20, 21, END, 60]
    rules = Rules(shortest_stage_tokens=4, common_share=0.0, most_links=2)
    asked, merged = (StageTracker(text_of, rules, turn_ends=ends) for ends in ((END,), ()))
    for stages in (asked, merged):
        stages.read(text)
    merged.close()
    # alone, the question links the unit; in one stage with the paragraph its repeated units take both links
    assert asked.links()[:3].tolist() == [1, 1, 1]
    assert merged.links()[:3].tolist() == [0, 0, 0]


def test_turn_ends_are_kept_by_a_fork_and_need_no_text():
    stages = StageTracker(turn_ends=(7,)).fork()
    stages.read([1, 2, 7, 3, 7, 7, 4])
    assert stages.transitions == 3


# -- turns of the query -------------------------------------------------------------------------------------


def told(stages, angles, ids=None):
    """Read one token per angle, each followed by its query in the plane; return where stages ended."""
    ended = []
    for step, angle in enumerate(angles):
        before = stages.transitions
        stages.read([ids[step] if ids else 1])
        stages.turn(np.array([np.cos(angle), np.sin(angle)]))
        if stages.transitions != before:
            ended.append(step)
    return ended


def test_a_stage_ends_two_steps_after_the_mean_query_has_turned():
    rules = Rules(shortest_stage_tokens=4, longest_stage_tokens=9999)
    angles = [0.0] * 40 + [np.pi / 2] * 40
    # by closed form: after k turned queries the recent mean has 1 - (7/8)^k of the new direction, and the
    # longer one 1 - (63/64)^k
    shares = [(1 - (1 - 1 / 8) ** k, 1 - (1 - 1 / 64) ** k) for k in range(1, 41)]
    directions = [(np.array([1 - a, a]), np.array([1 - b, b])) for a, b in shares]
    away = [1 - u @ v / np.linalg.norm(u) / np.linalg.norm(v) > 0.15 for u, v in directions]
    second = next(k for k in range(1, 40) if away[k] and away[k - 1])
    # turned queries number 1 + second have been told, the next token opens the new stage
    assert told(StageTracker(rules=rules), angles)[0] == 40 + second + 1


def test_a_stage_that_is_too_short_outlasts_a_turn_and_a_steady_query_ends_none():
    rules = Rules(shortest_stage_tokens=30, longest_stage_tokens=9999)
    turning = told(StageTracker(rules=rules), [0.0] * 5 + [2.0] * 60)
    assert turning
    assert turning[0] >= 30
    assert told(StageTracker(rules=rules), [0.3 + 0.01 * (i % 2) for i in range(200)]) == []


def test_one_step_away_is_not_a_turn():
    rules = Rules(shortest_stage_tokens=4, longest_stage_tokens=9999)
    lone = np.zeros(100)
    lone[50] = np.pi
    stages = StageTracker(rules=rules)
    # a single opposite query leaves the recent mean in its direction
    assert told(stages, lone) == []


def test_a_turn_depends_on_queries_alone_and_a_fork_keeps_its_own():
    rules = Rules(shortest_stage_tokens=4, longest_stage_tokens=9999)
    stages = StageTracker(rules=rules)
    told(stages, [0.0] * 40)
    twin = stages.fork()
    told(twin, [np.pi / 2] * 40)
    assert twin.transitions > stages.transitions
    assert told(stages, [0.0] * 40) == []


def test_the_engine_tells_the_queries_of_one_layer_before_rope_and_lets_go_of_the_model():
    import torch

    from rcq_cli.engine.turns import query_projection, watching_turns

    class Attention(torch.nn.Module):
        def __init__(self, index):
            super().__init__()
            self.layer_idx, self.q_proj = index, torch.nn.Linear(6, 8, bias=False)

    class Config:
        num_attention_heads = 2

        def get_text_config(self, **_):
            return self

    model = torch.nn.Module()
    model.layers, model.config = torch.nn.ModuleList(Attention(i) for i in range(3)), Config()
    assert query_projection(model, (0, 1, 2)) is model.layers[1].q_proj
    assert query_projection(torch.nn.Linear(2, 2), (0,)) is None
    seen = []

    class Heard:
        def turn(self, query):
            seen.append(query)

    rows = torch.randn(1, 5, 6)
    with watching_turns(model, (0, 1, 2), Heard()):
        made = model.layers[1].q_proj(rows)
        model.layers[0].q_proj(rows)
    model.layers[1].q_proj(rows)
    expected = (made[0, :, :4] + made[0, :, 4:]) / 2
    assert np.allclose(np.stack(seen), expected.detach().numpy(), atol=1e-6)
