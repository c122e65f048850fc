"""The rows of hvdtrain.gpu_day, and its page."""
