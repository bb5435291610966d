"""The mathematics: tensors and floats in, tensors out.  Torch only; `loss` is the one entry that
the learner uses.

    settings     what is read of a config: frozen structs, one a section; the names of the dicts
    loss         one batch's loss: once a batch, once an optimizer step, once a micro-batch
    batch        tokens in the loss, rewards as the advantage takes them, KL in the reward
    advantages   rewards to advantages
    correction   behaviour -> proximal: level, bound, reject, veto, self-normalise
    surrogates   trust regions on theta / anchor
    trust        its parts: what a surrogate is given and returns; those made for old samples
    reshape      gamma of IS-reshape, and its repairs
    kl           estimators, with a gradient through the expectation too, off-policy
    reductions   factors with global denominators
    stopping     early stop, budgets, ESS floor
    diagnostics  sums, and metrics from them
    split        the log ratio in three parts
    ratios       log-ratios and sums over samples

What the config chooses by name stands in dicts at the end of `advantages`, `surrogates` and beside
the functions of the others: SURROGATES, BY_ANSWER, BY_TOKEN, LEVELS, BOUNDS, STATISTICS, OVER,
ESTIMATORS, OFF_POLICY, REDUCTIONS, MODES, FORMS, BUDGETS, BASELINES, SCALES.

Packed notation: N response tokens, B samples; `seq` int64 [N] is each token's sample, tokens of a
sample contiguous and in order."""
