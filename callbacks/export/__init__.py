"""Take a model out of a run as a program: `torch.export`, TorchScript, ONNX."""
