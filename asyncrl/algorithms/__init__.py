"""The mathematics of the learner: tensors and floats in, tensors out. It depends on torch alone.

`loss` is the only entry that the learner uses. The other modules are its parts:

    settings     the config sections that the algorithms read, and the names of the registries
    loss         the loss of a batch: per batch, per optimizer step, per micro-batch; its reduction,
                 and KL budgets
    batch        the packed batch that the loss takes
    advantages   rewards to advantages: shaping, KL in the reward, estimators
    correction   importance weights proximal / behavior: level, bound, rejection, veto
    surrogates   trust regions on the ratio target / proximal
    reshape      gamma of IS-reshape and its repairs
    kl           KL estimators, also off-policy with a gradient through the expectation
    diagnostics  sums over tokens, the metrics computed from them, the log-ratio in three parts
    ratios       log-ratios and sums over samples

The names that a config can choose are keys of a dict: SURROGATES, BY_ANSWER, BY_TOKEN, LEVELS,
BOUNDS, STATISTICS, OVER, ESTIMATORS, OFF_POLICY, REDUCTIONS, MODES, FORMS, BUDGETS, BASELINES and
SCALES. Each dict stands after the functions that it lists.

Tensors are packed: N response tokens of B samples. `seq` int64 [N] is the sample of each token, and
the tokens of a sample are contiguous and in order.
"""
