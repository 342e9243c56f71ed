"""What of SGLang is served with blending, and by what test that is shown."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of SGLang that is served with blending.

    Attributes:
        name: For people.
        how: What blending does with it.
        test: Files of tests that show it, and what they do not show.
        refused_on: Versions of SGLang on which a start with it is refused.
    """

    name: str
    how: str
    test: str
    refused_on: tuple[str, ...] = ()


SERVED = (
    Feature(
        "chunked prefill",
        "each step blends its part; a chunk cut by a step is reused in both",
        "tests/test_features.py",
    ),
    Feature(
        "mixed prefill and decode batches",
        "decode rows are kept, each a step of one row",
        "tests/test_laws.py",
    ),
    Feature(
        "overlap schedule",
        "a plan is held until the result of its last step is looked at",
        "tests/test_features.py, tests/test_patterns.py",
    ),
    Feature(
        "eviction all the time",
        "chunks of a plan are locked; the others are built again",
        "tests/test_lifecycle.py, tests/test_chunk_store.py",
    ),
    Feature(
        "a host tier (HiCache)",
        "evicted chunks come back beside the forward, layer after layer",
        "tests/test_host_tier.py, not run on a GPU yet",
    ),
    Feature(
        "storage behind it (file, mooncake)",
        "chunks come to host memory before their request is admitted; every page is checked",
        "tests/test_storage_tier.py, tests/test_checked_storage.py, not run on a GPU yet",
        refused_on=("0.5.17",),
    ),
    Feature(
        "KV in 8 bit (--kv-cache-dtype fp8_e4m3, fp8_e5m2)",
        "keys are rotated in float32 and rounded once; scales of a checkpoint are applied",
        "tests/test_fp8_kv.py, tests/test_laws.py, not run on a GPU yet",
    ),
    Feature(
        "LoRA adapters",
        "a chunk belongs to its adapter; adapters follow the rows that are left",
        "tests/test_adapters.py, tests/test_adapters_rounds.py, not run on a GPU yet",
        refused_on=("0.5.17",),
    ),
    Feature(
        "n-gram speculation (--speculative-algorithm NGRAM)",
        "prompts are blended; the forwards that verify drafts are SGLang's own",
        "tests/test_speculation.py, not run on a GPU yet",
    ),
    Feature(
        "vision models, prompts without an image",
        "text is blended; a forward with an image in it is SGLang's own, and counted",
        "tests/test_images.py, tests/test_images_server.py",
        refused_on=("0.5.23",),
    ),
    Feature(
        "retraction, preemption, priorities",
        "planned anew when admitted again",
        "tests/test_lifecycle.py, tests/test_features.py",
    ),
    Feature(
        "abort at every stage",
        "locks go back with the request's memory",
        "tests/test_lifecycle.py, tests/test_features.py",
    ),
    Feature(
        "pages of several tokens",
        "matches end at pages, copies do not care",
        "tests/test_laws.py, tests/test_patterns.py",
    ),
    Feature(
        "tensor parallelism",
        "scores are summed over the ranks; the first rank's clock counts",
        "tests/test_ranks.py",
    ),
    Feature(
        "data-parallel replicas",
        "each has a cache of its own; route by documents for hits",
        "tests/test_server.py",
    ),
    Feature(
        "sessions",
        "separators and spans count in the turn's own tokens; earlier turns are its prefix",
        "tests/test_features.py",
    ),
    Feature("n > 1", "samples share the first one's blended prefix", "tests/test_server.py"),
    Feature("constrained decoding, logit processors", "decoding is stock", "tests/test_server.py"),
    Feature("streaming", "the report comes with the first token", "tests/test_server.py"),
    Feature(
        "logprobs of the prompt",
        "rows from logprob_start_len on are computed",
        "tests/test_laws.py",
    ),
    Feature(
        "flush, weight updates, memory release, pause",
        "background work is taken back first; new weights never meet chunks of old ones",
        "tests/test_orders.py, tests/test_operator.py",
    ),
    Feature(
        "CUDA graphs of blended layers, and weight updates",
        "given up with a warning if weights come to lie elsewhere",
        "tests/test_graphs.py, not run on a GPU yet",
    ),
    Feature(
        "decode graphs, torch.compile of decoding",
        "blending ends with the prefill",
        "not run on a GPU yet",
    ),
)
"""What is served, for docs/compatibility.md."""
