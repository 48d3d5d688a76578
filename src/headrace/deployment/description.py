"""A deployment in plain values, for people and for programs."""

from typing import Any

from headrace.deployment.resolve import Deployment


def describe(deployment: Deployment) -> dict[str, Any]:
    """Every decision, as JSON has it. Sizes are in bytes, times in seconds.

    None: of a cache's bytes, that they follow from the memory that is free once the weights are
    loaded; of the links, that there are none; of the rendezvous, that they need none; of its
    port, that a free one is picked.
    """
    config, ranks = deployment.config, deployment.ranks
    emulation = config.link_emulation
    return {
        "model": {
            "name": config.model,
            "files": str(deployment.model.files.path),
            "kind": deployment.model.files.kind,
            "architecture": deployment.model.sizes.architecture,
            "sampling_defaults": dict(deployment.model.sampling_defaults),
        },
        "dtype": deployment.dtype,
        "ranks": [
            {
                "rank": rank,
                "stage": ranks.stage_of(rank),
                "shard": ranks.shard_of(rank),
                "first_layer": share.first_layer,
                "end_layer": share.end_layer,
                "embeds": share.embeds,
                "samples": share.samples,
                "host": deployment.cluster.hosts[deployment.hosts[rank]].label,
                "weight_bytes": deployment.need.weights(share),
                "least_cache_bytes": deployment.need.cache(share),
                "cores": cpus.cpus,
                "threads": cpus.threads,
            }
            for rank, cpus in enumerate(deployment.cpus)
            for share in (deployment.shares[ranks.stage_of(rank)],)
        ],
        "weights": deployment.weights,
        "max_model_len": deployment.max_model_len,
        "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_microbatches": deployment.num_microbatches,
        "most_microbatches": deployment.most_microbatches,
        "window": deployment.window,
        "most_window": deployment.most_window,
        "token_feedback": config.token_feedback,
        "cache": {
            "block_size": config.block_size,
            "bytes_per_stage": deployment.cache.bytes_per_stage,
            "share_of_free": deployment.cache.share_of_free,
            "prefix_caching": config.enable_prefix_caching,
        },
        "timeouts": {
            "start": deployment.start_timeout,
            "stall": deployment.stall_timeout,
            "link": deployment.link_timeout,
        },
        "link_backend": None if ranks.count == 1 else deployment.link_backend,
        "rendezvous": None
        if ranks.count == 1 or deployment.link_backend != "gloo"
        else {"address": config.master_addr, "port": config.master_port or None},
        "link_emulation": None
        if emulation is None
        else {"latency_s": emulation.latency_s, "bytes_per_s": emulation.bytes_per_s},
        "scheduling_policy": config.scheduling_policy,
        "prefill_policy": config.prefill_policy,
        "max_itl_ms": config.max_itl_ms,
        "max_logprobs": config.max_logprobs,
        "seed": config.seed,
    }
