"""Small exact experiments on estimators.

Their expected gradients are sums over every sequence of a tiny language model.

    policy       the model: a table of logits over every prefix; its gradients, moments and
                 distances
    bias         KL estimators: bias and variance, on and off policy
    corrections  importance weights: bias and variance of the policy gradient
    reshape      many updates on one batch, and the bounds of the drift
    findings     tables and JSON of a result

The formulas are those of asyncrl.algorithms, as in the learner.
"""
