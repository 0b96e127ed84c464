"""Experiments about the cache: hits, reuse at equal memory, TTFT by policy, GPU time, global against local, "
"bandwidth."""

from __future__ import annotations

from benchmarks.papers.experiments.runner import Context, Section, within
from benchmarks.papers.plots import curves
from halfmoon.conductor.simulation.options import ClusterShape
from halfmoon.conductor.simulation.trace import reuse
from halfmoon.schemas.policy import PolicyName


def block_hits(context: Context) -> Section:
    """Hit rates in the trace itself, whatever serves it."""
    unbounded, lru = reuse(context.trace), reuse(context.trace, 3_000_000)
    drawn, drawn_lru = reuse(context.synthetic), reuse(context.synthetic, 3_000_000)
    return Section(
        title="Block hits of the trace",
        setting="One pool, token-weighted, prefixes of 512-token blocks, partial last blocks counted.",
        columns=["result", "published", "here", "verdict"],
        rows=[
            ["unbounded, conversation", "0.374", f"{unbounded:.4f}", _exact(unbounded, 0.374, 0.0005)],
            ["LRU of 3 M tokens, conversation", "0.139", f"{lru:.4f}", _exact(lru, 0.139, 0.005)],
            ["unbounded, synthetic", "0.651", f"{drawn:.4f}", _exact(drawn, 0.651, 0.0005)],
            ["LRU of 3 M tokens, synthetic", "0.315", f"{drawn_lru:.4f}", _exact(drawn_lru, 0.315, 0.005)],
        ],
    )


def _exact(ours: float, published: float, tolerance: float) -> str:
    return "equal" if abs(ours - published) <= tolerance else f"DIFFERS by {ours - published:+.4f}"


def equal_memory(context: Context) -> Section:
    """Eight caches of 3,000 blocks."""
    cluster = ClusterShape(prefill=8, decode=8, pool_blocks=3_000, decode_pool_blocks=0)
    names: tuple[PolicyName, ...] = ("round_robin", "dynamo", "local_cache_aware", "mooncake", "halfmoon")
    reports = {name: context.run(name, cluster=cluster) for name in names}
    again = context.run("halfmoon", cluster=cluster)
    ideal = reuse(context.trace, 8 * 3_000 * 512)
    published = {"round_robin": "0.091", "dynamo": "0.237 (NVIDIA Dynamo 1.6.1, its own replay)"}
    rows = [
        [
            name,
            published.get(name, "–"),
            f"{report.service.token_reuse:.4f}",
            f"{report.service.ttft_ms.mean / 1e3:.2f}",
        ]
        for name, report in reports.items()
    ]
    rows.append(["one pool of 24,000 blocks, LRU (bound)", "0.3125", f"{ideal:.4f}", "–"])
    ours = reports["halfmoon"]
    found = ours.service.token_reuse
    same = ours.digest == again.digest and ours.service.ttft_ms == again.service.ttft_ms
    return Section(
        title="Token reuse at equal memory",
        setting="8 prefill workers with 3,000 blocks of 512 tokens each; decode nodes keep nothing; no refusals.",
        columns=["policy", "published", "reuse here", "mean TTFT, s"],
        rows=rows,
        why=[
            f"Asked for: at least 0.30. {'Reached' if found >= 0.30 else 'MISSED'}: {found:.4f}.",
            "The bound counts partial last blocks and gives them memory; here only whole blocks are shared "
            "(one pool of 24,000 whole blocks would reach 0.3169), and one token of each prompt is always "
            "computed.",
            "Our `dynamo` is its published cost function over disaggregated workers with whole-prompt queues; "
            "its own replay batches prompts in one worker with decode, so queues and choices differ.",
            f"The same run twice: digests {'identical' if same else 'DIFFERENT'} (`{ours.digest}`); Dynamo's "
            "own replay gave 0.2352 and 0.2377.",
        ],
    )


def ttft_by_policy(context: Context) -> Section:
    """Sixteen nodes, four ways to choose."""
    paper = {"mooncake": 3.07, "local_cache_aware": 3.58, "least_loaded": 5.27, "random": 19.65}
    names: tuple[PolicyName, ...] = ("halfmoon", "mooncake", "local_cache_aware", "least_loaded", "random")
    means = {name: context.run(name).service.ttft_ms.mean / 1e3 for name in names}
    rows = []
    for name, mean in means.items():
        published = paper.get(name)
        ratio = mean / means["mooncake"]
        rows.append(
            [
                name,
                f"{published:.2f} s" if published else "–",
                f"{mean:.2f} s",
                f"{published / paper['mooncake']:.2f}" if published else "–",
                f"{ratio:.2f}",
                within(ratio, published / paper["mooncake"], 0.35) if published else "ours",
            ]
        )
    order = [name for name, _ in sorted(means.items(), key=lambda one: one[1]) if name in paper]
    delay = paper["mooncake"] - means["mooncake"]
    delayed = {
        name: (means[name] + delay) / paper["mooncake"]
        for name in ("local_cache_aware", "least_loaded", "random")
    }
    return Section(
        title="Mean TTFT by policy",
        setting="Conversation trace, 8 prefill + 8 decode workers, LLaMA3-70B on 8×A800, no refusals. Ratios "
        "are to the papers' global rule.",
        columns=["policy", "paper", "here", "paper's ratio", "ratio here", "verdict"],
        rows=rows,
        why=[
            f"Order {'as in the paper' if order == list(paper) else 'DIFFERENT: ' + ', '.join(order)}.",
            "All absolute times but `random` are shorter than the paper's: its engine's prefill speed is not "
            "published, ours is half of the data sheet's peak. A faster engine leaves shorter queues where "
            "load is balanced, while `random` is dominated by the worst node's queue at its utilisation of 75 "
            "%; so only its ratio is far off.",
            f"Differences would fit: with {delay:.2f} s more for each request, whatever the policy (what the "
            "paper's engine takes around a prefill is not given), the rule's time would be the paper's, and "
            "the other ratios "
            + ", ".join(
                f"{ratio:.2f} ({name}: {within(ratio, paper[name] / paper['mooncake'], 0.35)})"
                for name, ratio in delayed.items()
            )
            + ". No such delay was added.",
        ],
    )


def prefill_gpu_time(context: Context) -> Section:
    """GPU time of the prefills of the whole trace."""
    rows, why = [], []
    for name, arrivals, paper in (
        ("conversation", context.arrivals, 1.56),
        ("synthetic", context.drawn, 2.76),
    ):
        ours = context.run("halfmoon", arrivals=arrivals).devices.prefill_gpu_s
        vllm = context.run(system="vllm", arrivals=arrivals).devices.prefill_gpu_s
        ratio = vllm / ours
        rows.append([f"vLLM over ours, {name}", f"{paper}", f"{ratio:.2f}", within(ratio, paper, 0.25)])
        why.append(f"{name}: {vllm:,.0f} s against {ours:,.0f} s.")
    return Section(
        title="Prefill GPU time",
        setting="Whole trace at its own speed; halfmoon 8 + 8, vLLM (no prefix cache) 16 colocated workers.",
        columns=["result", "paper", "here", "verdict"],
        rows=rows,
        why=why,
    )


def global_against_local(context: Context) -> Section:
    """Ten prefill nodes of 3 M tokens."""
    cluster = ClusterShape(prefill=10, decode=10, pool_blocks=3_000_000 // 512, decode_pool_blocks=0)
    ours = context.run("halfmoon", cluster=cluster).service.token_reuse
    rows = []
    for trace, source, paper in (
        ("conversation", context.trace, 2.22),
        ("synthetic", context.synthetic, 2.36),
    ):
        one, ten = reuse(source, 3_000_000), reuse(source, 30_000_000)
        what = f"{trace}: one LRU of 30 M tokens ({ten:.4f}) over one of 3 M ({one:.4f})"
        rows.append([what, f"{paper}", f"{ten / one:.2f}", within(ten / one, paper, 0.25)])
    names: tuple[tuple[PolicyName, str], ...] = (
        ("least_loaded", "local caches, requests by load"),
        ("round_robin", "local caches, requests in turn"),
        ("local_cache_aware", "local caches, requests by cache and load"),
    )
    for name, what in names:
        local = context.run(name, cluster=cluster).service.token_reuse
        rows.append(
            [f"simulated: global ({ours:.4f}) over {what} ({local:.4f})", "–", f"{ours / local:.2f}", "–"]
        )
    return Section(
        title="Global against local cache, hit rate",
        setting="10 prefill nodes × 3 M tokens, decode nodes keep nothing, no refusals.",
        columns=["result", "paper", "here", "verdict"],
        rows=rows,
        why=[
            "The paper does not say how its local caches get their requests. Sizes alone give the first rows. "
            "In simulation it depends on routing: caches that see a tenth of every conversation find far "
            "less, caches that requests are sent to for what they hold find nearly as much (but with longer "
            "queues).",
        ],
    )


def bandwidth(context: Context) -> Section:
    """Mean TTFT against the network."""
    names: tuple[PolicyName, ...] = ("mooncake", "halfmoon")
    gbits = (25, 50, 100, 200, 400, 800)
    points = {
        name: [
            (
                float(gbit),
                context.run(
                    name,
                    cluster=ClusterShape(prefill=8, decode=8, link_bytes_s=gbit * 10**9 // 8),
                ).service.ttft_ms.mean
                / 1e3,
            )
            for gbit in gbits
        ]
        for name in names
    }
    path = curves(
        context.plot("bandwidth"),
        {str(name): line for name, line in points.items()},
        xlabel="network of a node, Gb/s",
        ylabel="mean TTFT, s",
        log_x=True,
        dashed="halfmoon",
    )
    ours, theirs = dict(points["halfmoon"]), dict(points["mooncake"])
    flat = ours[100] / ours[800] - 1
    return Section(
        title="TTFT against bandwidth",
        setting="Conversation trace, 8 + 8 workers, every node's network as given, no refusals.",
        columns=["Gb/s", *(f"{gbit}" for gbit in gbits)],
        rows=[
            ["papers' rule, s", *(f"{theirs[gbit]:.2f}" for gbit in gbits)],
            ["ours, s", *(f"{ours[gbit]:.2f}" for gbit in gbits)],
        ],
        why=[
            f"Paper: flat above 100 Gb/s, steep below. Here from 800 to 100 Gb/s {flat:+.1%}, from 100 to 25 "
            f"Gb/s {theirs[25] / theirs[100] - 1:+.1%} (papers' rule) and {ours[25] / ours[100] - 1:+.1%} "
            "(ours: it fetches layer by layer beside the queue and computing, and less where computing is "
            "faster).",
            "Below about 15 Gb/s the KV that goes to decode nodes alone (47 TB in an hour from 8 nodes) is "
            "more than the network carries.",
        ],
        plots=[path.name],
    )
