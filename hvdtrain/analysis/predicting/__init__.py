"""Predicts training on more ranks by a model fitted to runs on one host (`hvdtrain.scaling --model-of`)."""
