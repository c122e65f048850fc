"""What more ranks would give: runs of one host, fitted, and extrapolated over a wire (`hvdtrain.scaling --model-of`)."""
