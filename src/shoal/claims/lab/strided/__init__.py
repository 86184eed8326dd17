"""strided: tensors of any strides packed, and sent by the method that is fastest for them."""
