"""Learned costs: refitted profiles, the bandwidth of links, the length of answers.

Predictions are integers (ns), made by the formulas of `CostProfile`. Its coefficients are refitted from workers'
reports, by recursive least squares with floats under + - * / only, so that every conductor gets the same bits.

Source: Mooncake (FAST'25), equation 1, for the form of prefill; the transfer term and its sharing are ours.
"""

from __future__ import annotations

import msgspec

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.numbers import SECOND_NS

#: Relative error of one measurement: how much a new one counts.
NOISE = 0.1
#: Added to the variance with every measurement, so that old ones fade (about a thousand count).
DRIFT = 0.001
#: A measurement counts as at most this many times the prediction, and at least one part in this many (a stalled
#: machine).
OUTLIER = 4.0
#: Part of a new measurement in a bandwidth's moving average, in tenths.
EWMA_TENTHS = 3
#: A bandwidth that was not measured for this long is forgotten: one bad transfer must not close a link for
#: ever.
LINK_STALE_NS = 60 * SECOND_NS
#: Answers that count in a running mean of lengths.
MEAN_WINDOW = 64
#: Expected tokens of an answer when none was seen yet.
EXPECTED_TOKENS_FIRST = 256

# Typical sizes, (1, tokens, tokens²) of a prefill and (1, sequences, context tokens) of a step: at these, no
# coefficient of the prior is thought to be below a tenth of the whole.
_PREFILL_TYPICAL = (1.0, 1_000.0, 1_000_000.0)
_DECODE_TYPICAL = (1.0, 8.0, 8_000.0)
#: The time at the typical size when a profile is empty (all zeros).
_UNKNOWN_NS = float(SECOND_NS)


# --- refitting ----------------------------------------------------------------------------------------------


class Fit(msgspec.Struct):
    """Three coefficients under recursive least squares, each in units of its own `scale` (ns), prior variance
    1.
    """

    scale: list[float]
    weights: list[float]
    #: 3×3, symmetric, by rows.
    covariance: list[float]


def _first_fit(coefficients: tuple[float, float, float], typical: tuple[float, float, float]) -> Fit:
    whole = sum(c * x for c, x in zip(coefficients, typical, strict=True)) or _UNKNOWN_NS
    scale = [max(c, 0.1 * whole / x) for c, x in zip(coefficients, typical, strict=True)]
    return Fit(
        scale=scale,
        weights=[c / s for c, s in zip(coefficients, scale, strict=True)],
        covariance=[1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0],
    )


def _observe(fit: Fit, features: tuple[float, float, float], seen_ns: int) -> bool:
    """Learn from one measurement; False (and nothing learned) when it, or the fit with it, makes no sense."""
    # Written out: each prefill and each heartbeat of a decode worker teaches, and loops take twice as long.
    (f0, f1, f2), (s0, s1, s2), (w0, w1, w2) = features, fit.scale, fit.weights
    x0, x1, x2 = f0 * s0, f1 * s1, f2 * s2
    predicted = x0 * w0 + x1 * w1 + x2 * w2
    seen = float(seen_ns)
    if seen <= 0.0:
        return False
    if predicted > 0.0:
        seen = min(max(seen, predicted / OUTLIER), predicted * OUTLIER)
    p00, p01, p02, _, p11, p12, _, _, p22 = fit.covariance
    px0 = p00 * x0 + p01 * x1 + p02 * x2
    px1 = p01 * x0 + p11 * x1 + p12 * x2
    px2 = p02 * x0 + p12 * x1 + p22 * x2
    spread = (NOISE * seen) * (NOISE * seen) + x0 * px0 + x1 * px1 + x2 * px2
    error = seen - predicted
    weights = [
        max(0.0, w0 + px0 / spread * error),
        max(0.0, w1 + px1 / spread * error),
        max(0.0, w2 + px2 / spread * error),
    ]
    variances = p00 - px0 * px0 / spread, p11 - px1 * px1 / spread, p22 - px2 * px2 / spread
    for known in (*weights, *variances):
        if not 0.0 <= known < 1e6:
            return False  # for NaN too
    p00, p11, p22 = [one + DRIFT if one < 1.0 else one for one in variances]
    p01, p02, p12 = p01 - px0 * px1 / spread, p02 - px0 * px2 / spread, p12 - px1 * px2 / spread
    fit.weights, fit.covariance = weights, [p00, p01, p02, p01, p11, p12, p02, p12, p22]
    return True


def prefill_fit(cost: CostProfile) -> Fit:
    return _first_fit(
        (float(cost.prefill_base_ns), cost.prefill_per_token_ps / 1e3, cost.prefill_per_token2_fs / 1e6),
        _PREFILL_TYPICAL,
    )


def decode_fit(cost: CostProfile) -> Fit:
    return _first_fit(
        (
            float(cost.decode_base_ns),
            float(cost.decode_per_sequence_ns),
            cost.decode_per_context_token_ps / 1e3,
        ),
        _DECODE_TYPICAL,
    )


def refit_prefill(fit: Fit, cost: CostProfile, tokens: int, cached: int, seen_ns: int) -> CostProfile:
    """`cost` with its prefill part as the measurement suggests."""
    features = (1.0, float(tokens - cached), float(tokens * tokens - cached * cached))
    if not _observe(fit, features, seen_ns):
        return cost
    base, per_token, per_token2 = _coefficients(fit)
    return msgspec.structs.replace(
        cost,
        prefill_base_ns=_whole(base),
        prefill_per_token_ps=_whole(per_token * 1e3),
        prefill_per_token2_fs=_whole(per_token2 * 1e6),
    )


def refit_decode(
    fit: Fit, cost: CostProfile, sequences: int, context_tokens: int, seen_ns: int
) -> CostProfile:
    """`cost` with its decode part as the measurement suggests."""
    if not _observe(fit, (1.0, float(sequences), float(context_tokens)), seen_ns):
        return cost
    base, per_sequence, per_context_token = _coefficients(fit)
    return msgspec.structs.replace(
        cost,
        decode_base_ns=_whole(base),
        decode_per_sequence_ns=_whole(per_sequence),
        decode_per_context_token_ps=_whole(per_context_token * 1e3),
    )


def _coefficients(fit: Fit) -> list[float]:
    return [w * s for w, s in zip(fit.weights, fit.scale, strict=True)]


def _whole(value: float) -> int:
    return min(int(value + 0.5), 2**53)


def measured_permille(known: int, expected_ns: int, seen_ns: int) -> int:
    """The moving average of a step's time, in thousandths of the expected time, after one more step."""
    if expected_ns <= 0 or seen_ns <= 0:
        return known
    least, most = int(1_000 / OUTLIER), int(1_000 * OUTLIER)
    seen = min(max(seen_ns * 1_000 // expected_ns, least), most)
    return ((10 - EWMA_TENTHS) * known + EWMA_TENTHS * seen) // 10


# --- transfers ----------------------------------------------------------------------------------------------


class Link(msgspec.Struct):
    """Bandwidth that transfers from one node to another achieved, and when it was last measured."""

    bytes_s: int
    measured_ns: int


def measured_link(
    link: Link | None, moved_bytes: int, took_ns: int, sharing: int, now_ns: int
) -> Link | None:
    """The moving average after one more transfer, which shared its source with `sharing - 1` others."""
    if moved_bytes <= 0 or took_ns <= 0:
        return link
    seen = min(max(1, moved_bytes * SECOND_NS * sharing // took_ns), 2**50)
    if link is None or now_ns - link.measured_ns > LINK_STALE_NS:
        return Link(bytes_s=seen, measured_ns=now_ns)
    return Link(bytes_s=((10 - EWMA_TENTHS) * link.bytes_s + EWMA_TENTHS * seen) // 10, measured_ns=now_ns)


def transfer_ns(moved_bytes: int, bytes_s: int, sharing: int, latency_ns: int) -> int:
    """A transfer that shares its source with `sharing - 1` others."""
    return latency_ns + moved_bytes * sharing * SECOND_NS // bytes_s


# --- answers ------------------------------------------------------------------------------------------------


class Answers(msgspec.Struct):
    """Running means over the answers of one class of `max_tokens`."""

    count: int = 0
    #: Thousandths of a token.
    millitokens: int = 0
    decode_ns: int = 0


def answer_class(max_tokens: int) -> int:
    """Answers are alike when their limits lie within the same power of two."""
    return max_tokens.bit_length()


def learn_answer(answers: Answers, tokens: int, decode_ns: int) -> None:
    answers.count += 1
    window = min(answers.count, MEAN_WINDOW)
    answers.millitokens += (tokens * 1_000 - answers.millitokens) // window
    answers.decode_ns += (decode_ns - answers.decode_ns) // window


def expected_tokens(answers: Answers | None, max_tokens: int) -> int:
    """The expected length of an answer, in tokens."""
    if answers is None or answers.count == 0:
        return min(max_tokens, EXPECTED_TOKENS_FIRST)
    return max(1, min(max_tokens, -(-answers.millitokens // 1_000)))


def expected_decode_ns(answers: Answers | None, tokens: int, tbt_ns: int) -> int:
    """How long a request stays in decode: t_d of ARXIV, section 7."""
    if answers is None or answers.count == 0:
        return tokens * tbt_ns
    return answers.decode_ns
