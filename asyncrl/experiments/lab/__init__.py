"""Small exact experiments: what an estimator's gradient is in expectation, by summing over every
sequence of a tiny language model.

    policy       the model: a table of logits over every prefix; its gradients, moments and
                 distances
    bias         KL estimators: bias and variance, on and off policy
    corrections  importance weights: bias and variance of the policy gradient
    reshape      many updates on one batch: what bounds the drift
    page         table, plot and JSON of a result

The formulas are those of asyncrl.algorithms, the ones that the learner runs; nothing is written a
second time here."""
