"""What a server's metrics become in a replica's report."""

from __future__ import annotations

from workers.engines.server.server_metrics import ServerMetrics, TokenProgress, block_size
from workers.messages.status import ServerLoad

TEXT = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="a } b"} 3.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 1.0
vllm:num_preemptions_total{engine="0",model_name="tiny"} 5.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 1e+03
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} NONSENSE
vllm:num_requests_waiting{engine="2",model_name="tiny"} NaN
vllm:num_preemptions_total{engine="2",model_name="tiny"} +Inf
vllm:prefix_cache_hits_total 640.0 1700000000
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 30.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 4.0
"""


def test_vllms_metrics_are_read() -> None:
    """Summed over its engines; what cannot be read counts as nothing."""
    assert ServerMetrics.read(TEXT) == ServerMetrics(0.25, 4.0, 5.0, 1000.0, 640.0, 34.0)


def test_the_block_size_is_that_of_the_running_server() -> None:
    """A back end may not use the one of the flag."""
    line = 'vllm:cache_config_info{block_size="%s",cache_dtype="auto",engine="0",hash_block_size="7"} 1.0\n'

    assert block_size(TEXT + line % 128) == block_size(line.replace("{", '{a="b",') % 128) == 128
    assert block_size(TEXT) is block_size(line % "None") is None


def test_another_servers_metrics_are_zeros() -> None:
    assert ServerMetrics.read("up 1\nllamacpp:requests_deferred 3\n") == ServerMetrics()


def test_a_queue_in_two_readings_is_reported() -> None:
    """One reading may show requests that the server is just starting."""
    waits, idle = ServerMetrics(0.5, 2.0, 1.0), ServerMetrics()

    assert waits.load(None) == waits.load(idle) == ServerLoad(0.5, 2, 1, queues=False)
    assert waits.load(waits) == ServerLoad(0.5, 2, 1, queues=True)
    assert not idle.load(waits).queues


def test_only_readings_show_that_no_token_comes() -> None:
    """The time between the last change and the last reading, so that rare readings are no sign of a hang."""
    progress = TokenProgress()
    progress.read(7.0, 10.0)
    progress.begin(50.0)
    assert progress.stalled_s == 0.0
    progress.read(7.0, 60.0)
    progress.fail(75.0)
    assert progress.stalled_s == 25.0
    progress.read(8.0, 80.0)
    assert progress.stalled_s == 0.0


def test_a_server_that_counts_no_tokens_is_never_hung() -> None:
    """Its answers that come in one piece may take any time, and its metrics may wait behind them."""
    progress = TokenProgress()
    progress.begin(0.0)
    progress.read(None, 60.0)
    progress.fail(90.0)

    assert progress.stalled_s == 0.0
