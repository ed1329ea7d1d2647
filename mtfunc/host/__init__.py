"""Host memory: where parameters, gradients and moments live."""
