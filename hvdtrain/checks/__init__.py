"""What hvdtrain.doctor looks at. A check takes the findings, what is known here, and the engine if ranks must answer."""
