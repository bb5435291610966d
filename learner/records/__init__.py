"""Files that the learner writes besides weights: step log, recording, log of samples."""
