"""One test or more for each rule of placements.rules.checks, through the text of a spec."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Machine
from placements.planner.plan import plan
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.parse import parse
from placements.spec.schema import Spec
from tests.placements.fleets import GPT2_XL, LAPTOP, LLAMA_2_7B, PLAIN, brief, host, model, problems_of

LLAMA_3_8B = Checkpoint("llama", 32, 8, 32, 4096, 14336, 128, 128256, 8192, False, 8_030_261_248)
MIXTRAL = Checkpoint("mixtral", 32, 8, 32, 4096, 14336, 128, 32000, 32768, False, 46_702_792_704, 8)
SEVERAL = "hosts: [{instance: inf2.48xlarge}, {instance: trn1.32xlarge, count: 2}]\n"
REAL = "hosts: {instance: inf2.48xlarge}\n"
TWO = "hosts: {instance: inf2.48xlarge, count: 2}\n"


def one_model(fields: str, hosts: str = REAL) -> str:
    """A spec of one model; its fields begin at 4:5."""
    return f"{hosts}models:\n  a:\n    {fields}\n    source: ./a\n"


def ids(text: str, checkpoints: Mapping[str, Checkpoint] | None = None, machine: Machine = LAPTOP) -> list[str]:
    return brief(problems_of(text, checkpoints, machine))


def whats(text: str, checkpoints: Mapping[str, Checkpoint] | None = None, machine: Machine = LAPTOP) -> list[str]:
    return [problem.what for problem in problems_of(text, checkpoints, machine)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # inside the host
        ("{cores: ['16-23'], tp_degree: 8}", []),
        ("{cores: ['20-27'], tp_degree: 8}", ["pin-outside-host 3:15"]),
        ("{cores: ['inf2.48xlarge/0:24'], tp_degree: 1}", ["pin-outside-host 3:15"]),
        # known hosts
        ("{cores: ['inf2.48xlarge/1:0-7'], tp_degree: 8}", ["pin-unknown-host 3:15"]),
        # length
        ("{cores: ['0-7'], tp_degree: 4}", ["pin-length 3:15"]),
        ("{cores: ['0-7']}", ["pin-length 3:15"]),
        # alignment: legal, not preferred, judges pins
        ("{cores: ['2-9'], tp_degree: 8}", []),
        ("{cores: ['1-8'], tp_degree: 8}", ["pin-misaligned 3:15"]),
        ("{cores: ['1-2'], tp_degree: 2}", ["pin-misaligned 3:15"]),
        ("{cores: ['7'], tp_degree: 1}", []),
        ("{cores: ['2-7'], tp_degree: 6, allow_degrees: [6]}", []),
        ("{cores: ['3-8'], tp_degree: 6, allow_degrees: [6]}", ["pin-misaligned 3:15"]),
        ("{cores: ['12-23'], tp_degree: 12, allow_degrees: [12]}", []),
        ("{cores: ['2-13'], tp_degree: 12, allow_degrees: [12]}", []),  # any even start, on consecutive devices
        ("{cores: ['3-14'], tp_degree: 12, allow_degrees: [12]}", ["pin-misaligned 3:15"]),
        # degrees
        ("{tp_degree: 24}", []),
        ("{tp_degree: 6}", ["illegal-degree 3:7"]),
        ("{tp_degree: 6, allow_degrees: [6]}", []),
        ("{tp_degree: 6, allow_degrees: [10]}", ["illegal-degree 3:7"]),
        ("{tp_degree: 12}", ["undocumented-degree 3:7"]),
        ("{tp_degree: 32}", ["degree-exceeds-host 3:7"]),
        ("{tp_degree: 32, allow_degrees: [32]}", ["degree-exceeds-host 3:7"]),
        # replicas
        ("{cores: ['0-1', '2-3'], tp_degree: 2}", []),
        ("{cores: ['0-1', '2-3', '4-5'], tp_degree: 2}", ["too-many-pins 3:29"]),
        ("{cores: ['0-1', '2-3'], tp_degree: 2, replicas: {min: 0, max: 2}}", []),
        ("{replicas: {min: 3, max: 2}}", ["min-exceeds-max 3:18"]),
        ("{tp_degree: 8, replicas: {min: 1, max: 3}}", []),
        ("{tp_degree: 8, replicas: {min: 1, max: 4}}", ["max-never-fits 3:40"]),
        ("{tp_degree: 8, replicas: 4}", ["min-never-fits 3:21"]),
        # cores that are not taken
        ("{cores: ['0-7'], tp_degree: 8, engine: cpu}", ["pin-without-effect 3:7"]),
        ("{tp_degree: 7, engine: cpu}", []),
    ],
)
def test_rules_about_one_model(fields: str, expected: list[str]) -> None:
    """Each on a real inf2.48xlarge, at its place."""
    text = f"{REAL}models:\n  a: {fields[:-1]}, source: ./a}}\n"
    assert ids(text) == expected


def test_a_pin_outside_is_reported_with_the_existing_cores() -> None:
    """The message has the pin, the host and its cores."""
    assert whats(one_model("cores: ['20-27']\n    tp_degree: 8")) == [
        'pin "20-27" ends at core 27; inf2.48xlarge/0 has cores 0-23'
    ]


def test_a_pin_on_reserved_cores_is_reported_with_them() -> None:
    hosts = "hosts: {instance: inf2.48xlarge, reserve: {cores: [5, '22-23']}}\n"
    assert whats(one_model("cores: ['16-23']\n    tp_degree: 8", hosts)) == [
        'pin "16-23" contains reserved cores 22, 23'
    ]


def test_an_overlap_is_reported_at_the_later_pin() -> None:
    """The shared cores as a range, and the other model."""
    text = REAL + (
        "models:\n  a: {source: ./a, tp_degree: 8, cores: ['0-7']}\n  b: {source: ./b, tp_degree: 8, cores: ['4-11']}\n"
    )
    assert (ids(text), whats(text)) == (
        ["pin-overlap 4:42"],
        ['pin "4-11" of "b" shares cores 4-7 with "a", "0-7"'],
    )


def test_overlaps_of_three_pins_are_all_reported() -> None:
    """Each pair once, at the later of the two."""
    text = REAL + (
        "models:\n"
        "  a: {source: ./a, tp_degree: 8, cores: ['0-7']}\n"
        "  b: {source: ./b, tp_degree: 8, cores: ['4-11']}\n"
        "  c: {source: ./c, tp_degree: 8, cores: ['6-13']}\n"
    )
    assert whats(text) == [
        'pin "4-11" of "b" shares cores 4-7 with "a", "0-7"',
        'pin "6-13" of "c" shares cores 6-7 with "a", "0-7"',
        'pin "6-13" of "c" shares cores 6-11 with "b", "4-11"',
    ]


def test_pins_of_one_model_must_not_overlap_either() -> None:
    """Two replicas cannot share a core, also of one model; one core is not shown as a range."""
    text = one_model("cores: ['0-1', '1-2']\n    tp_degree: 2\n    replicas: 2")
    assert 'pin "1-2" of "a" shares core 1 with another pin of "a", "0-1"' in whats(text)


def test_on_one_host_a_pin_with_the_host_conflicts_with_one_without() -> None:
    """There is no other host."""
    text = REAL + (
        "models:\n"
        "  a: {source: ./a, tp_degree: 2, cores: ['4-5']}\n"
        "  b: {source: ./b, tp_degree: 2, cores: ['inf2.48xlarge/0:4-5']}\n"
    )
    assert ids(text) == ["pin-overlap 4:42"]


def test_pins_that_two_models_merge_from_one_mapping_overlap() -> None:
    """The place is that of the pin, and both models are named."""
    text = REAL + ("models:\n  a: &a {source: ./a, tp_degree: 2, cores: ['4-5']}\n  b: {<<: *a}\n")
    assert (ids(text), whats(text)) == (
        ["pin-overlap 3:45"],
        ['pin "4-5" of "b" shares cores 4-5 with "a", "4-5"'],
    )


def test_pins_on_different_hosts_do_not_overlap() -> None:
    """Also if one of them has no host and may go to the other."""
    text = TWO + (
        "models:\n"
        "  a: {source: ./a, tp_degree: 8, cores: ['0-7']}\n"
        "  b: {source: ./b, tp_degree: 8, cores: ['inf2.48xlarge/0:0-7']}\n"
    )
    assert ids(text) == []


def test_pins_overlap_if_no_host_is_left_for_them() -> None:
    """Three times the same range on two hosts."""
    text = TWO + "models:\n" + "".join(f"  {m}: {{source: ./a, tp_degree: 8, cores: ['0-7']}}\n" for m in "abc")
    assert whats(text) == ['pin "0-7" of "c" shares cores 0-7 with "a", "0-7", and none of 2 hosts has the cores free']


@pytest.mark.parametrize(
    ("heads", "tp", "more", "expected"),
    [
        (25, 1, "", []),
        (25, 8, "", ["heads-not-divisible 4:5"]),
        (25, 8, "\n    allow_head_padding: true", []),
        (32, 24, "", ["heads-not-divisible 4:5"]),
        (32, 8, "", []),
    ],
)
def test_tp_degree_divides_the_heads(heads: int, tp: int, more: str, expected: list[str]) -> None:
    """Strict, unless the spec allows padding."""
    checkpoint = Checkpoint("llama", heads, heads, 1, heads * 64, 64, 64, 100, None, False, 1000)
    assert ids(one_model(f"tp_degree: {tp}{more}"), {"a": checkpoint}) == expected


def test_heads_that_do_not_divide_name_the_degrees_that_do() -> None:
    """gpt2-xl is documented for tp 1 only."""
    (problem,) = problems_of(one_model("tp_degree: 8\n    max_len: 512"), {"a": GPT2_XL})
    assert (problem.what, problem.hint.split(",")[0]) == (
        "tp_degree 8 does not divide the 25 attention heads of a",
        "use 1",
    )


def test_memory_shows_every_term_and_a_degree_that_fits() -> None:
    """Llama-2-7B with 32 slots of 4096 on two cores."""
    text = one_model("tp_degree: 2\n    max_batch: 32\n    max_len: 4096")
    (problem,) = problems_of(text, {"a": LLAMA_2_7B})
    assert (problem.id, problem.what, problem.hint) == (
        "hbm-exceeded",
        "a does not fit into memory with tp_degree 2, max_batch 32, max_len 4096, bf16: weights 6.28 + KV cache 32.00 "
        "+ scratch 1.00 + runtime 1.49 = 40.76 GiB on the first core (40.36 on the others), more than 0.95 x 16 = "
        "15.20 GiB of HBM",
        "tp_degree 8 needs 11.53 GiB on the first core (11.13 on the others); or lower max_batch or max_len, or set "
        "hbm_overhead_gib if you measured the overhead",
    )


def test_memory_that_fits_is_not_mentioned() -> None:
    """The same on eight cores; and the limit is 0.95 of the HBM, itself included."""
    assert ids(one_model("tp_degree: 8\n    max_batch: 32\n    max_len: 4096"), {"a": LLAMA_2_7B}) == []


def test_the_overhead_override_decides_a_close_case() -> None:
    """13.55 GiB of weights and KV: 1.6 GiB of overhead fit, 2 do not."""
    close = "max_len: 2048\n    max_batch: 1\n    hbm_overhead_gib: "
    assert (ids(one_model(close + "1.6"), {"a": LLAMA_2_7B}), ids(one_model(close + "2"), {"a": LLAMA_2_7B})) == (
        [],
        ["hbm-exceeded 3:3"],
    )


def test_memory_of_an_emulated_host_is_checked_like_a_real_one() -> None:
    """With the cpu engine's fp32: 25.1 GiB of weights on one core."""
    text = "hosts: {emulate: inf2.48xlarge}\nmodels: {a: {source: ./a, max_batch: 1}}"
    assert [place for place in ids(text, {"a": LLAMA_2_7B}) if "threads" not in place] == ["hbm-exceeded 2:10"]


def test_cpu_models_on_a_real_host_use_no_hbm() -> None:
    """The degree and the heads do not matter there, either."""
    assert ids(one_model("engine: cpu\n    tp_degree: 3"), {"a": LLAMA_2_7B}) == []


def test_max_len_is_within_the_checkpoint_s_positions() -> None:
    """An explicit length only; the default adapts."""
    assert (
        ids(one_model("max_len: 2048"), {"a": GPT2_XL}),
        ids(one_model("max_len: 1024"), {"a": GPT2_XL}),
        ids(one_model("tp_degree: 1"), {"a": GPT2_XL}),
    ) == (
        ["max-len-exceeds-positions 4:5"],
        [],
        [],
    )


def test_without_a_checkpoint_its_rules_are_skipped() -> None:
    """No findings about heads, memory and length."""
    assert ids(one_model("tp_degree: 24\n    max_len: 100000\n    max_batch: 512")) == []


def test_a_neuron_engine_on_emulated_hosts_is_a_warning() -> None:
    """The plan is still of use."""
    text = "hosts: {emulate: inf2.xlarge}\nmodels:\n  a: {engine: nxd-inference, source: ./a}\n"
    problems = problems_of(text)
    assert [(problem.id, problem.severity, problem.where) for problem in problems] == [
        ("engine-needs-neuron", "warning", "f.yaml:3:7")
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("engine: echo\n    engine_options: {step_ms: 5}", []),
        ("engine: echo\n    engine_options: {step: 5}", ["unknown-engine-option 5:22"]),
        ("engine: echo\n    engine_options: {step_ms: 0.5}", []),
        ("engine: echo\n    engine_options: {step_ms: -1}", ["out-of-range 5:22"]),
        ("engine: echo\n    engine_options: {step_ms: .nan}", ["out-of-range 5:22"]),
        ("engine: echo\n    engine_options: {step_ms: fast}", ["wrong-type 5:22"]),
        ("engine: cpu\n    engine_options: {step_ms: 5}", ["unknown-engine-option 5:22"]),
        ("engine: cpu\n    engine_options: {prefill_chunk: 64}", []),
        ("engine: cpu\n    engine_options: {prefill_chunk: 0}", ["out-of-range 5:22"]),
        ("engine: cpu\n    engine_options: {prefill_chunk: 2.5}", ["wrong-type 5:22"]),
        ("engine: cpu\n    engine_options: {prefill_chunk: true}", ["wrong-type 5:22"]),
        ("engine: cpu\n    engine_options: {prefix_cache: true}", []),
        ("engine: cpu\n    engine_options: {prefix_cache: false, prefill_chunk: 64}", []),
        ("engine: cpu\n    engine_options: {prefix_cache: 1}", ["wrong-type 5:22"]),
        ("engine: cpu\n    engine_options: {prefix_cache: null}", ["wrong-type 5:22"]),
        ("engine: cpu\n    engine_options: {prefix_cache: always}", ["wrong-type 5:22"]),
        ("engine: echo\n    engine_options: {prefix_cache: true}", ["unknown-engine-option 5:22"]),
        ("engine: transformers-neuronx\n    engine_options: {prefix_cache: true}", ["unknown-engine-option 5:22"]),
        ("engine: nxd-inference\n    engine_options: {prefix_cache: true}", []),
        ("engine: nxd-inference\n    engine_options: {prefix_cache: 1}", ["wrong-type 5:22"]),
        ("engine: nxd-inference\n    engine_options: {is_prefix_caching: true}", ["unknown-engine-option 5:22"]),
    ],
)
def test_engine_options_are_those_of_the_engine(fields: str, expected: list[str]) -> None:
    """An option that the engine does not know would do nothing."""
    assert ids(one_model(fields)) == expected


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ("max_len: 256", "prefix_cache: true, pa_num_blocks: 32, pa_block_size: 32", []),
        ("max_len: 256", "prefix_cache: true, pa_num_blocks: 31", ["setting-unsupported"]),
        ("max_len: 256", "prefix_cache: true, pa_block_size: 24", ["setting-unsupported"]),
        ("max_len: 256", "prefix_cache: true, prefix_buckets: [64, 160]", []),
        ("max_len: 256", "prefix_cache: true, prefix_buckets: [100]", ["setting-unsupported"]),
        ("max_len: 256", "prefix_cache: true, prefix_buckets: [128, 64]", ["setting-unsupported"]),
        ("max_len: 256", "prefix_cache: true, prefix_buckets: [256]", ["setting-unsupported"]),
        ("max_len: 256", "prefix_cache: true, attn_tkg_nki_kernel_enabled: true", ["setting-unsupported"]),
        ("max_len: 256", "prefix_cache: true, cp_degree: 1", []),
        ("max_len: 256", "prefix_cache: false, pa_num_blocks: 32", ["setting-unsupported"]),
        ("max_len: 128", "prefix_cache: true", ["setting-unsupported"]),
        ("max_len: 256, max_batch: 1", "prefix_cache: true", ["setting-unsupported"]),
        ("max_len: 256, quantize_kv: fp8", "prefix_cache: true", ["setting-unsupported"]),
        ("max_len: 256, draft: {source: ./d}", "prefix_cache: true", ["setting-unsupported"]),
        ("max_len: 256, buckets: {prefill: [64, 128, 256]}", "prefix_cache: true", ["setting-unsupported"]),
        ("max_len: 256, buckets: {prefill: [256]}", "prefix_cache: true", ["setting-unsupported"]),
    ],
)
def test_a_prefix_cache_of_nxd_inference_fits_the_other_fields(fields: str, options: str, expected: list[str]) -> None:
    """Its package would fail, or return wrong answers."""
    lines = re.sub(r", (?=[a-z_]+:)", "\n    ", fields)
    problems = ids(one_model(f"engine: nxd-inference\n    {lines}\n    engine_options: {{{options}}}"))
    assert [problem.split()[0] for problem in problems] == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("draft: {source: ./d}", []),
        ("engine: cpu\n    draft: {source: ./d, k: 2}", []),
        ("engine: echo\n    draft: {source: ./d}", ["draft-unsupported 5:5"]),
        ("engine: transformers-neuronx\n    draft: {source: ./d}", []),
        ("engine: nxd-inference\n    draft: {source: ./d}", []),
        ("engine: optimum-neuron\n    draft: {source: ./d}", ["draft-unsupported 5:5"]),
    ],
)
def test_a_draft_is_for_an_engine_that_drafts(fields: str, expected: list[str]) -> None:
    """An engine that drafts nothing would silently ignore it."""
    assert ids(one_model(fields)) == expected


def test_a_draft_counts_in_memory() -> None:
    """A model that fits alone does not fit with a draft of the same size."""
    text = f"{REAL}models:\n  a: {{source: ./a, tp_degree: 2, draft: {{source: ./d}}}}\n"
    spec = parse(text, "f.yaml").spec
    assert spec is not None
    reported = [
        [problem.id for problem in check(spec, [host()], {"a": LLAMA_2_7B}, drafts)]
        for drafts in (None, {"a": LLAMA_2_7B})
    ]
    assert reported == [[], ["hbm-exceeded"]]


@pytest.mark.parametrize(
    ("reserve", "expected"),
    [
        ("{vcpus: 3, cores: [1]}", []),
        ("{vcpus: 4}", ["reserve-exceeds-host 1:42"]),
        ("{vcpus: 99}", ["reserve-exceeds-host 1:42"]),
        ("{cores: [1, 2]}", ["reserve-outside-host 1:42"]),
    ],
)
def test_the_reserve_leaves_something_of_the_host(reserve: str, expected: list[str]) -> None:
    """On an inf2.xlarge of 4 vCPUs and 2 cores."""
    assert ids(f"hosts: {{instance: inf2.xlarge, reserve: {reserve}}}\nmodels: {{a: {{source: ./a}}}}") == expected


@pytest.mark.parametrize(
    ("models", "threads"),
    [
        ("a: {source: ./a, tp_degree: 8, replicas: 2}", None),  # 1 + 1 threads on 2 CPUs
        ("a: {source: ./a, tp_degree: 8, replicas: 3}", 3),
        ("a: {source: ./a, tp_degree: 8, replicas: {min: 0, max: 3}}", 3),  # could run
        ("a: {source: ./a, tp_degree: 24}", None),  # a share of exactly 2
        ("a: {source: ./a, replicas: 900}", 24),  # no more than cores allow
        ("a: {source: ./a, tp_degree: 8, replicas: 2}, b: {source: ./b, tp_degree: 12, replicas: 2}", None),
        ("a: {source: ./a, tp_degree: 8, replicas: 2}, b: {source: ./b, tp_degree: 4, replicas: 2}", 4),
        ("a: {source: ./a, tp_degree: 2, threads: lmi}", 4),
    ],
)
def test_threads_beyond_the_budget_are_a_warning(models: str, threads: int | None) -> None:
    """If replicas that fit on the cores together could exceed the CPUs; two of them here."""
    hosts = "hosts: {instance: inf2.48xlarge, reserve: {vcpus: 190}}"
    reported = [p for p in problems_of(f"{hosts}\nmodels: {{{models}}}") if "threads" in p.id]
    warnings = [(p.id, p.severity, f"could run {threads} threads on the 2 CPUs" in p.what) for p in reported]
    assert warnings == ([("threads-oversubscribed", "warning", True)] if threads else [])


@pytest.mark.parametrize(("threads", "warned"), [("share", False), ("lmi", True), ("3", True)])
def test_on_an_emulated_host_only_explicit_threads_count(threads: str, warned: bool) -> None:
    """Its CPUs are those of a laptop, where shares are below one thread for each replica."""
    text = f"hosts: {{emulate: inf2.48xlarge}}\nmodels: {{a: {{source: ./a, replicas: 9, threads: {threads}}}}}"
    assert [id.split()[0] for id in ids(text)] == ["threads-oversubscribed"] * warned


def test_the_thread_warning_is_one_line_for_all_hosts() -> None:
    """With the worst host; the remedy is in the same line."""
    text = (
        "hosts: [{instance: inf2.xlarge}, {instance: inf2.48xlarge, reserve: {vcpus: 190}}]\n"
        "models: {a: {source: ./a, threads: lmi, replicas: 4}}"
    )
    (reported,) = [problem for problem in problems_of(text) if "threads" in problem.id]
    assert reported.what == (
        "replicas could run 8 threads on the 2 CPUs of inf2.48xlarge/0 and slow each other down: "
        "use fewer replicas or threads"
    )
    assert reported.hint == ""


def test_shares_of_a_real_host_never_exceed_it() -> None:
    """A host full of single cores stays within 184 of 192 CPUs."""
    assert ids(one_model("replicas: 24")) == []


@pytest.mark.parametrize(
    ("cores", "replicas", "hint"),
    [
        ("[0, 1, 2, 3, 4, 5, 6, 7]", 1, 'write cores: ["0-7"]'),
        (f"{list(range(16))}", 2, 'write cores: ["0-7", "8-15"]'),
        (f"{list(range(1, 9))}", 1, "write a range of 8 cores for each replica"),  # it begins at an odd core
        ("[0, 1, 2, 5]", 1, "write a range of 8 cores for each replica"),
    ],
)
def test_a_list_of_single_cores_is_one_error_with_the_ranges(cores: str, replicas: int, hint: str) -> None:
    """Each item is the range of a replica; the ranges are named if the model may have them."""
    text = f"{REAL}models:\n  a: {{source: ./a, tp_degree: 8, replicas: {replicas}, cores: {cores}}}\n"
    [problem] = problems_of(text)
    assert (problem.id, problem.hint) == ("pin-length", hint)


def test_a_range_with_a_colon_is_one_error() -> None:
    [problem] = problems_of(f"{REAL}models:\n  a: {{source: ./a, tp_degree: 8, cores: ['0:7']}}\n")
    assert (problem.id, problem.hint) == ("pin-unknown-host", 'write "0-7"')


def test_max_counts_the_min_of_models_of_the_same_or_a_higher_rank() -> None:
    """b's min prevents a's max; c ranks lower and does not."""
    text = REAL + (
        "models:\n"
        "  a: {source: ./a, tp_degree: 8, replicas: {min: 1, max: 3}, priority: 1}\n"
        "  b: {source: ./b, tp_degree: 8, priority: 1}\n"
        "  c: {source: ./c, tp_degree: 8, replicas: 1}\n"
    )
    assert whats(text) == ["max 3 of a can never fit: there is room for 2 beside the min of the others"]


def test_a_fleet_of_thousands_is_checked_without_trying_every_max() -> None:
    """Each model would need a separate plan."""
    results = []
    for count in (2, 5, 6):
        models = ", ".join(f"m{i}: {{source: ./a, replicas: {{min: 0, max: 900}}}}" for i in range(count))
        results.append([place.split()[0] for place in ids(f"{REAL}models: {{{models}}}")])
    assert results == [["max-never-fits"] * 2, ["max-never-fits"], []]


def test_rules_that_read_an_invalid_field_are_skipped() -> None:
    """One error is not reported twice."""
    assert ids(one_model("tp_degree: eight\n    cores: ['0-7']")) == ["wrong-type 4:5"]


def test_a_misspelt_key_is_read_as_the_intended_one() -> None:
    """tp: 8 beside a pin of eight cores is one error, not two."""
    assert ids(one_model("tp: 8\n    cores: ['0-7']")) == ["unknown-key 4:5"]


def test_invalid_pins_do_not_hide_overlaps_of_valid_ones() -> None:
    """Everything that can be checked is."""
    text = REAL + (
        "models:\n"
        "  a: {source: ./a, tp_degree: 8, cores: ['0-7']}\n"
        "  b: {source: ./b, tp_degree: 8, cores: ['0-x', '4-11'], replicas: 2}\n"
    )
    assert ids(text) == ["bad-range 4:42", "pin-overlap 4:49"]


def test_invalid_hosts_do_not_affect_rules_about_the_spec() -> None:
    """No default host causes further errors."""
    text = "hosts: {instance: inf2.4xl}\nmodels:\n  a: {source: ./a, cores: ['90-99'], replicas: {min: 2, max: 1}}\n"
    assert ids(text) == ["unknown-instance 1:9", "min-exceeds-max 3:49"]


def test_the_real_machine_is_judged_when_hosts_are_omitted() -> None:
    """An inf2.xlarge has two cores."""
    assert ids("models:\n  a: {source: ./a, tp_degree: 8}", machine=Machine(tuple(range(4)), "inf2.xlarge")) == [
        "degree-exceeds-host 2:20"
    ]


def test_mixed_hosts_are_checked_by_those_with_cores() -> None:
    """A plain CPU host beside a Neuron host does not make a degree illegal."""
    spec = Spec(models=(model("a", 8, "0-7", engine="nxd-inference"),))
    assert check(spec, [PLAIN, host()]) == ()


# Hosts of several types


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("{tp_degree: 8}", []),
        ("{tp_degree: 4}", []),  # of inf2 only
        ("{tp_degree: 16}", []),  # of trn1 only
        ("{tp_degree: 32}", []),
        ("{tp_degree: 6}", ["illegal-degree 3:7"]),
        ("{tp_degree: 12}", ["undocumented-degree 3:7"]),
        ("{tp_degree: 64}", ["degree-exceeds-host 3:7"]),
        ("{tp_degree: 32, replicas: 2}", []),
        ("{tp_degree: 32, replicas: 3}", ["min-never-fits 3:22"]),
        # pins
        ("{tp_degree: 4, cores: ['trn1.32xlarge/0:0-3']}", ["illegal-degree 3:29"]),
        ("{tp_degree: 4, cores: ['trn1.32xlarge/0:0-3'], allow_degrees: [4]}", []),
        ("{tp_degree: 4, cores: ['inf2.48xlarge/0:2-5']}", []),
        ("{tp_degree: 4, cores: ['2-5']}", []),
        ("{tp_degree: 8, cores: ['2-9']}", []),  # on inf2
        ("{tp_degree: 8, cores: ['trn1.32xlarge/1:2-9']}", ["pin-misaligned 3:29"]),
        ("{tp_degree: 8, cores: ['24-31']}", []),  # on trn1
        ("{tp_degree: 8, cores: ['inf2.48xlarge/0:24-31']}", ["pin-outside-host 3:29"]),
        ("{tp_degree: 8, cores: ['32-39']}", ["pin-outside-host 3:29"]),
        ("{tp_degree: 1, cores: ['trn1.32xlarge/2:0']}", ["pin-unknown-host 3:29"]),
    ],
)
def test_a_model_is_legal_if_one_type_is_suitable(fields: str, expected: list[str]) -> None:
    """An inf2.48xlarge and two trn1.32xlarge; a pin is checked by its possible hosts."""
    assert [place.split(",")[0] for place in ids(f"{SEVERAL}models:\n  a: {fields[:-1]}, source: ./a}}\n")] == expected


def test_an_unsuitable_model_is_reported_with_all_types() -> None:
    """Each with its degrees, or its size."""
    six, wide = (whats(f"{SEVERAL}models: {{a: {{source: ./a, tp_degree: {tp}}}}}\n") for tp in (6, 64))
    assert (six, wide) == (
        [
            "tp_degree 6 is not supported on any host: 1, 2, 4, 8, 12, 16 and 24 on inf2.48xlarge; "
            "1, 2, 8, 16 and 32 on trn1.32xlarge"
        ],
        ["tp_degree 64 exceeds the cores of every host: 24 cores on inf2.48xlarge; 32 cores on trn1.32xlarge"],
    )


def test_a_pin_on_a_type_without_the_degree_names_the_types_that_have_it() -> None:
    """The degree itself is legal."""
    text = f"{SEVERAL}models: {{a: {{source: ./a, tp_degree: 24, cores: ['trn1.32xlarge/0:0-23']}}}}\n"
    (problem,) = problems_of(text)
    assert (problem.id, problem.what, problem.hint) == (
        "illegal-degree",
        'pin "trn1.32xlarge/0:0-23" is on trn1.32xlarge, which does not support tp_degree 24',
        "pin to a host of type inf2.48xlarge",
    )


def test_a_degree_of_ones_own_is_aligned_on_trn2() -> None:
    """A pin is checked, and the planner places no replica elsewhere: cores 0 to 3 are reserved."""
    text = "hosts: {instance: trn2.48xlarge, reserve: {cores: ['0-3']}}\n"
    text += "models: {a: {source: ./a, tp_degree: 6, allow_degrees: [6], MORE}}\n"
    assert ids(text.replace("MORE", "cores: ['8-13']")) == ["pin-misaligned 2:69"]
    parsed = parse(text.replace("MORE", "replicas: 9").encode())
    assert parsed.spec is not None
    placements = plan(parsed.spec, hosts_for(parsed.spec, LAPTOP)).placements
    assert [each.cores and each.cores.first for each in placements] == [6 * n for n in range(1, 10)]


def test_a_misaligned_pin_is_reported_with_each_types_step() -> None:
    """Two on inf2, eight on trn1."""
    text = f"{SEVERAL}models: {{a: {{source: ./a, tp_degree: 8, cores: ['1-8']}}}}\n"
    assert whats(text) == [
        'pin "1-8" begins at core 1; tp_degree 8 must begin at multiples of 2 on inf2.48xlarge; multiples of 8 on '
        "trn1.32xlarge"
    ]


def test_memory_is_judged_by_the_type_with_the_most_hbm() -> None:
    """Llama-2-7B with 16 slots of 2048 needs 18 GiB on each of two cores: of trn2, not of inf2."""
    text = "hosts: [{instance: inf2.48xlarge}, {instance: trn2.3xlarge}]\nmodels:\n  a: {source: ./a, tp_degree: 2, "
    reported = [
        (problem.id, "22.80 GiB of HBM of trn2.3xlarge" in problem.what, problem.where)
        for slots in ("max_batch: 16", "max_batch: 64", "max_batch: 16, cores: ['inf2.48xlarge/0:0-1']")
        for problem in problems_of(f"{text}{slots}}}\n", {"a": LLAMA_2_7B})
    ]
    assert reported == [("hbm-exceeded", True, "f.yaml:3:20"), ("hbm-exceeded", False, "f.yaml:3:57")]


def test_an_lnc_of_one_halves_the_hbm_and_its_degrees_are_undocumented() -> None:
    """allow_degrees removes the warning; degree 1 needs no other core."""

    def reported(lnc: int, more: str) -> list[str]:
        text = f"hosts: {{instance: trn2.48xlarge, lnc: {lnc}}}\nmodels:\n  a: {{source: ./a, max_batch: 1, {more}}}\n"
        return [problem.id for problem in problems_of(text, {"a": LLAMA_2_7B})]

    assert (reported(2, "tp_degree: 1"), reported(1, "tp_degree: 1")) == ([], ["hbm-exceeded"])
    assert (reported(2, "tp_degree: 8"), reported(1, "tp_degree: 8")) == ([], ["undocumented-degree"])
    assert reported(1, "tp_degree: 8, allow_degrees: [8]") == []


def test_threads_count_only_replicas_that_a_type_can_hold() -> None:
    """A degree of 16 does not fit on inf2; no real host runs more fixed threads than it has CPUs."""
    shared = "b: {source: ./b, tp_degree: 16, replicas: {min: 1, max: 2}}"
    text = f"{SEVERAL}models: {{a: {{source: ./a, tp_degree: 16, threads: 100}}, {shared}}}\n"
    wide = text.replace("100", "200")
    warnings = [[p.what.split(" and slow")[0] for p in problems_of(spec) if "threads" in p.id] for spec in (text, wide)]
    assert warnings == [["replicas could run 160 threads on the 122 CPUs of trn1.32xlarge/0"], []]


def test_the_reserve_of_each_entry_is_checked_at_its_own_place() -> None:
    """Each item of a list of hosts has its own; memory too."""
    text = (
        "hosts:\n"
        "  - {instance: inf2.48xlarge, count: 2, reserve: {cores: [23]}}\n"
        "  - {instance: inf2.xlarge, reserve: {cores: [2], vcpus: 4, memory_gib: 16}}\n"
        "models: {a: {source: ./a}}\n"
    )
    assert ids(text) == ["reserve-outside-host 3:39", "reserve-exceeds-host 3:51", "reserve-exceeds-host 3:61"]


# Host memory, spreading, quantized weights, KV heads, experts


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("host_memory_gib: 14", []),
        ("host_memory_gib: 14.5", ["host-memory-exceeded 4:5"]),
        ("engine: cpu\n    host_memory_gib: 17", ["host-memory-exceeded 5:5"]),
    ],
)
def test_a_replica_that_no_host_can_load_is_reported(fields: str, expected: list[str]) -> None:
    """On an inf2.xlarge of 16 GiB, of which Ray and the gateway have 2; emulated hosts are not checked."""
    assert ids(one_model(fields, "hosts: {instance: inf2.xlarge}\n")) == expected
    assert ids(one_model(fields, "hosts: {emulate: inf2.xlarge}\n")) == []


def test_the_estimate_of_the_load_needs_one_large_enough_host() -> None:
    """Llama-3-8B has 15 GiB of weights in bf16; reserved memory is excluded, by default 2 GiB."""
    small = "hosts: {instance: inf2.xlarge}\n"
    mixed = "hosts: [{instance: inf2.xlarge}, {instance: inf2.8xlarge}]\n"
    text = "tp_degree: 2\n    max_batch: 1\n    neff_cache: s3://neffs/a"
    results = [
        [problem.id for problem in problems_of(one_model(text, hosts), {"a": LLAMA_3_8B})] for hosts in (small, mixed)
    ]
    assert results == [["host-memory-exceeded"], []]


@pytest.mark.parametrize(
    ("fields", "instance", "expected"),
    [
        ("engine: nxd-inference", "trn1.2xlarge", ["compile-memory-exceeded"]),
        ("engine: nxd-inference", "trn1.32xlarge", []),
        ("engine: nxd-inference\n    neff_cache: s3://neffs/a", "trn1.2xlarge", []),
        ("engine: cpu\n    dtype: fp32\n    host_memory_gib: 8", "trn1.2xlarge", []),
    ],
)
def test_a_compile_that_a_host_may_kill_is_a_warning(fields: str, instance: str, expected: list[str]) -> None:
    """Compilers of a graph need 12 GiB each, and 64 at least; with a neff_cache another machine can compile."""
    text = one_model(
        f"tp_degree: 2\n    max_len: 2048\n    max_batch: 1\n    {fields}", f"hosts: {{instance: {instance}}}\n"
    )
    problems = problems_of(text, {"a": LLAMA_3_8B})
    assert [problem.id for problem in problems if problem.severity == "warning"] == expected


@pytest.mark.parametrize(
    ("fields", "hosts", "expected"),
    [
        ("{spread: host, replicas: 2}", TWO, []),
        ("{spread: host, replicas: 3}", TWO, ["spread-too-narrow 3:7"]),
        ("{spread: {host: 2}, replicas: 4}", TWO, []),
        ("{spread: {host: 2}, replicas: 5}", TWO, ["spread-too-narrow 3:7"]),
        ("{spread: host, replicas: 3, tp_degree: 8}", SEVERAL, []),
        ("{spread: host, replicas: 3, tp_degree: 32}", SEVERAL, ["spread-too-narrow 3:7"]),  # two hosts are so large
        ("{spread: host, engine: cpu, replicas: 3}", TWO, ["spread-too-narrow 3:7"]),  # they take no cores
        ("{spread: host, replicas: 2, cores: ['0', '1']}", TWO, []),
        (
            "{spread: host, cores: ['inf2.48xlarge/0:0', 'inf2.48xlarge/0:1'], replicas: 2}",
            TWO,
            ["spread-too-narrow 3:50"],
        ),
        ("{spread: {host: 2}, cores: ['0', '1'], replicas: 2}", REAL, []),
        ("{spread: host, cores: ['0', '1'], replicas: {min: 1, max: 2}}", REAL, ["spread-too-narrow 3:34"]),
    ],
)
def test_min_and_pins_agree_with_spread(fields: str, hosts: str, expected: list[str]) -> None:
    """No plan could ever place them; a mere lack of room is for min-never-fits and max-never-fits."""
    text = f"{hosts}models:\n  a: {fields[:-1]}, source: ./a}}\n"
    assert [place for place in ids(text) if "never-fits" not in place] == expected


@pytest.mark.parametrize(
    ("engine", "hosts", "expected"),
    [
        ("cpu", REAL, ["quantize-unsupported 5:5"]),
        ("echo", REAL, ["quantize-unsupported 5:5"]),
        ("auto", "hosts: {emulate: inf2.48xlarge}\n", ["quantize-unsupported 5:5"]),
        ("auto", REAL, []),
        ("transformers-neuronx", REAL, []),
        ("nxd-inference", REAL, []),
        ("optimum-neuron", REAL, ["quantize-unsupported 5:5"]),
    ],
)
def test_one_byte_weights_are_for_neuron_engines(engine: str, hosts: str, expected: list[str]) -> None:
    """`auto` is the cpu engine on emulated hosts."""
    assert ids(one_model(f"engine: {engine}\n    quantize: int8", hosts)) == expected


@pytest.mark.parametrize(
    ("engine", "family", "expected"),
    [
        ("transformers-neuronx", "gpt_neox", ["quantize-unsupported 5:5"]),
        ("transformers-neuronx", "mixtral", ["quantize-unsupported 5:5"]),
        ("transformers-neuronx", "llama", []),
        ("auto", "gpt_neox", ["quantize-unsupported 5:5"]),  # no other engine of Neuron devices serves it
        ("auto", "llama", []),
    ],
)
def test_transformers_neuronx_does_not_quantize_every_family(engine: str, family: str, expected: list[str]) -> None:
    """GPT-NeoX's class takes no QuantizationConfig, and the graphs of Mixtral's experts do not build with scales."""
    checkpoint = Checkpoint(family, 16, 16, 1, 1024, 4096, 64, 1000, 2048, False, 1000)
    assert ids(one_model(f"engine: {engine}\n    quantize: int8"), {"a": checkpoint}) == expected


@pytest.mark.parametrize(
    ("engine", "hosts", "expected"),
    [
        ("transformers-neuronx", REAL, []),
        ("auto", REAL, []),
        ("auto", "hosts: {emulate: inf2.48xlarge}\n", ["gqa-unsupported 5:5"]),
        ("nxd-inference", REAL, ["gqa-unsupported 5:5"]),
        ("optimum-neuron", REAL, ["gqa-unsupported 5:5"]),
        ("cpu", REAL, ["gqa-unsupported 5:5"]),
    ],
)
def test_only_transformers_neuronx_supports_group_query_attention(engine: str, hosts: str, expected: list[str]) -> None:
    """NxD Inference chooses by itself."""
    assert ids(one_model(f"engine: {engine}\n    group_query_attention: replicated-heads", hosts)) == expected


def test_shards_over_the_batch_are_refused() -> None:
    """Prompts run one at a time: the package falls back to another method, or on one core answers wrongly."""
    assert ids(one_model("engine: transformers-neuronx\n    group_query_attention: shard-over-batch")) == [
        "gqa-unsupported 5:5"
    ]


def grouped(heads: int, kv_heads: int, head_dim: int = 64) -> Checkpoint:
    return Checkpoint("llama", heads, kv_heads, 1, heads * head_dim, 64, head_dim, 100, None, False, 1000)


@pytest.mark.parametrize(
    ("way", "checkpoint", "tp", "slots", "why"),
    [
        ("shard-over-heads", grouped(32, 8), 8, 4, ""),
        ("shard-over-heads", grouped(32, 8), 24, 4, "tp_degree 24 does not divide the 8 KV heads"),
        ("shard-over-heads", grouped(32, 1), 2, 4, "tp_degree 2 does not divide the 1 KV head"),
        ("replicated-heads", grouped(32, 5), 8, 3, ""),
        ("all-gather-heads", grouped(32, 8), 8, 4, ""),
        ("all-gather-heads", grouped(24, 4, 3), 8, 4, "tp_degree 8 does not divide the total KV width, 12"),
        ("all-gather-heads", grouped(20, 4), 8, 4, ""),  # 4 heads of padding, one for each KV head
        (
            "all-gather-heads",
            grouped(22, 4),
            8,
            4,
            "2 heads of padding cannot be divided among 4 KV heads",
        ),
        ("shard-over-heads", None, 8, 4, ""),  # not known
        (
            "all-gather-heads\n    fuse_qkv: true",
            grouped(32, 4),
            8,
            4,
            "tp_degree 8 splits 4 KV heads, whose weights fuse_qkv would join",
        ),
        ("all-gather-heads\n    fuse_qkv: true", grouped(32, 8), 8, 4, ""),
    ],
)
def test_how_kv_heads_are_dealt_out_must_be_possible(
    way: str, checkpoint: Checkpoint | None, tp: int, slots: int, why: str
) -> None:
    """The rules of transformers-neuronx's check_gqa_fallback, which would take another way instead."""
    fields = f"group_query_attention: {way}\n    tp_degree: {tp}\n    max_batch: {slots}\n    allow_head_padding: true"
    reported = [
        (problem.id, problem.where, problem.what)
        for problem in problems_of(one_model(fields), {"a": checkpoint} if checkpoint else {})
    ]
    assert reported == (
        [("gqa-not-divisible", "f.yaml:4:5", f"{way.split()[0]} is not possible for a: {why}")] if why else []
    )


@pytest.mark.parametrize(
    ("engine", "tp", "expected"),
    [
        ("transformers-neuronx", 8, []),
        ("transformers-neuronx", 24, []),
        ("transformers-neuronx", 12, ["experts-not-divisible"]),
        ("nxd-inference", 12, []),
        ("auto", 12, []),
    ],
)
def test_experts_and_degree_divide_each_other(engine: str, tp: int, expected: list[str]) -> None:
    """Mixtral's eight on transformers-neuronx; the other engines shard within an expert."""
    text = one_model(f"engine: {engine}\n    tp_degree: {tp}\n    allow_degrees: [12]\n    allow_head_padding: true")
    assert [problem.id for problem in problems_of(text, {"a": MIXTRAL})] == expected


def test_quantized_weights_free_memory() -> None:
    """Llama-2-7B in int8 fits on one core, in bf16 with as many slots it does not."""
    text = "engine: transformers-neuronx\n    max_batch: 2"
    results = [ids(one_model(text + more), {"a": LLAMA_2_7B}) for more in ("", "\n    quantize: int8")]
    assert [[place.split()[0] for place in places] for places in results] == [["hbm-exceeded"], []]


def test_a_min_without_room_is_reported() -> None:
    """With the number that fits, and a hint that does not suggest a lower max."""
    text = REAL + "models:\n  a: {source: ./a, tp_degree: 8}\n  b: {source: ./b, tp_degree: 8, replicas: 3}\n"
    assert ids(text) == ["min-never-fits 4:34"]
    assert whats(text) == ["min 3 of b can never fit: there is room for 2 beside the min of the others"]


def test_fixed_threads_of_a_real_host_count_as_far_as_they_fit() -> None:
    """A plan refuses the rest; what has no fixed number comes on top."""
    text = f"{REAL}models:\n  a: {{source: ./a, tp_degree: 8, threads: 100, replicas: {{min: 1, max: 3}}"
    assert [place for place in ids(text + "}\n") if "threads" in place] == []
    rival = "}\n  b: {source: ./b, tp_degree: 8, replicas: {min: 1, max: 2}}\n"
    reported = [what for what in whats(text + rival) if "threads" in what]
    assert len(reported) == 1
    assert "could run 220 threads" in reported[0]


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ("tp_degree: 8, max_len: 8192", "quantize: int8 needs "),  # 16 GiB of weights on each core
        ("tp_degree: 1", "tp_degree 16 needs "),  # a documented degree would need padded heads
        ("tp_degree: 24, allow_head_padding: true, max_batch: 512", "lower max_batch or max_len"),
    ],
)
def test_a_hint_for_memory_can_work(fields: str, hint: str) -> None:
    """No fewer slots where the weights alone are too much."""
    large = Checkpoint("llama", 64, 8, 80, 8192, 28672, 128, 128256, 8192, False, 70_553_706_496)
    text = f"{REAL}models: {{a: {{source: ./a, engine: transformers-neuronx, {fields}}}}}\n"
    (problem,) = [p for p in problems_of(text, {"a": large}) if p.id == "hbm-exceeded"]
    assert hint in problem.hint
    assert problem.hint.startswith("lower") == hint.startswith("lower")


def test_degrees_are_suggested_only_if_they_have_the_memory() -> None:
    """64 heads on two of 24 cores would be legal, but too few for 70 billion parameters; 16 are enough."""
    large = Checkpoint("llama", 64, 8, 80, 8192, 28672, 128, 128256, 8192, False, 70_553_706_496)
    text = f"{REAL}models: {{a: {{source: ./a, tp_degree: 24}}}}\n"
    (problem,) = [p for p in problems_of(text, {"a": large}) if p.id == "heads-not-divisible"]
    assert problem.hint == "use 16, or add allow_head_padding: true for an engine that pads with zeros"


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ("{a: {engine: echo, aliases: [gpt-4o, org/model:latest]}, b: {engine: echo, aliases: [x]}}", []),
        ("{a: {engine: echo, aliases: [b]}, b: {engine: echo}}", ["alias-taken 1:38"]),
        ("{a: {engine: echo, aliases: [a]}}", ["alias-taken 1:38"]),
        ("{a: {engine: echo, aliases: [x]}, b: {engine: echo, aliases: [y, x]}}", ["alias-taken 1:74"]),
        ("{a: {engine: echo, aliases: [x, x]}}", ["alias-taken 1:41"]),
        (
            "{a: {engine: vllm, source: ./a, adapters: {b: ./b}, aliases: ['a:b']}}",
            ["interpreter-unset 1:14", "alias-taken 1:71"],
        ),
        ("{a: {engine: echo, aliases: [' x']}}", ["bad-name 1:38"]),
        ("{a: {engine: echo, aliases: [3]}}", ["wrong-type 1:38"]),
        ("{a: {engine: echo, aliases: x}}", ["wrong-type 1:28"]),
        ("{a: {engine: echo, aliases: {b: }}, b: {engine: echo}}", ["alias-taken 1:38"]),
        ("{a: {engine: echo, aliases: [x]}, b: {engine: echo, aliases: {y: {seed: 1}, x: }}}", ["alias-taken 1:85"]),
        ("{a: {engine: echo, aliases: {' x': }}}", ["bad-name 1:38"]),
        ("{a: {engine: echo, response_template: xml}}", ["unknown-value 1:28"]),
    ],
)
def test_a_name_identifies_one_model(models: str, expected: list[str]) -> None:
    """An alias is not the name of a model or another alias; the later one is reported."""
    assert ids(f"models: {models}\n") == expected


def test_aliases_are_not_allowed_in_defaults() -> None:
    """Every model would have the same."""
    assert ids("defaults: {aliases: [x]}\nmodels: {a: {engine: echo}}\n") == ["unknown-key 1:12"]


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ("", []),
        ("{}", []),
        ("{temperature: 0, max_tokens: 5, system: Be brief., stop: [a, b], chat_template_kwargs: {a: true, b: 1}}", []),
        ("{temperature: 3}", ["out-of-range 1:42"]),
        ("{top_p: 0}", ["out-of-range 1:42"]),
        ("{tempratur: 1}", ["unknown-key 1:42"]),
        ("{n: 2}", ["unknown-key 1:42"]),
        ("{system: ''}", ["wrong-type 1:42"]),
        ("{seed: x}", ["wrong-type 1:42"]),
        ("{stop: [a, '']}", ["wrong-type 1:52"]),
        ("{chat_template_kwargs: {a: [1]}}", ["wrong-type 1:65"]),
        ("3", ["wrong-type 1:38"]),
    ],
)
def test_a_default_of_an_alias_is_a_field_of_requests(defaults: str, expected: list[str]) -> None:
    """With its bounds; problems name its place."""
    assert ids(f"models: {{a: {{engine: echo, aliases: {{x: {defaults}}}}}}}\n") == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("engine: server, server: {command: [s, --port, '{port}'], slots: 4}", ["no effect"]),
        ("engine: echo, kind: embedding", ["no effect"]),
        ("engine: echo", ["presence_penalty"]),
        ("source: ./a, engine: nxd-inference, sampling: device", ["presence_penalty", "seed"]),
        ("source: ./a, engine: nxd-inference", []),
    ],
)
@pytest.mark.parametrize("place", ["aliases: {{x: {}, y: {{}}}}", "request_defaults: {}"])
def test_a_default_that_no_request_could_have_is_an_error(place: str, fields: str, expected: list[str]) -> None:
    """A server gets requests as they were sent; encoders have no such fields; not every engine has penalties."""
    given = "{presence_penalty: 1, seed: 2, top_p: 0.5}"
    problems = problems_of(f"{REAL}models:\n  a: {{{fields},\n    {place.format(given)}}}\n")
    refused = [problem for problem in problems if problem.id == "setting-unsupported"]

    assert [problem.where.split(":")[1] for problem in refused] == ["4"] * len(expected)
    assert [name for problem, name in zip(refused, expected, strict=True) if name in problem.what] == expected


def test_the_defaults_of_a_model_hold_for_all_its_names_and_those_of_an_alias_come_first() -> None:
    """Field by field."""
    defaults = "request_defaults: {top_k: 3, temperature: 1}, aliases: {x: {temperature: 0}, y: }"
    spec = parse(f"models: {{a: {{engine: echo, {defaults}}}}}\n").spec
    assert spec is not None

    own = {"temperature": 1.0, "top_k": 3}
    assert spec.models[0].defaults_by_name == {"a": own, "x": {**own, "temperature": 0.0}, "y": own}


def test_aliases_are_the_same_names_as_a_list_or_as_a_mapping() -> None:
    """Names without defaults have none."""
    as_list, as_mapping = (
        parse(f"models: {{a: {{engine: echo, aliases: {aliases}}}}}\n").spec.models[0]  # type: ignore[union-attr]
        for aliases in ("[x, y]", "{x: , y: {}}")
    )

    assert list(as_list.aliases) == list(as_mapping.aliases) == ["x", "y"]
    assert as_list.alias_defaults == as_mapping.alias_defaults == {}
