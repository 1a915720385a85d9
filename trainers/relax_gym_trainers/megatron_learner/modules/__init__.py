"""Parts of a Megatron layer on plain torch: what megatron-core has only with Transformer Engine."""
