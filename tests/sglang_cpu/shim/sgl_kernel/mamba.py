"""See the package."""

from sgl_kernel import missing

causal_conv1d_fn_cpu = missing("mamba.causal_conv1d_fn_cpu")
causal_conv1d_update_cpu = missing("mamba.causal_conv1d_update_cpu")
chunk_gated_delta_rule_cpu = missing("mamba.chunk_gated_delta_rule_cpu")
