"""What kernel_checks.py checks, for those that run it: the names of its checks, none of which is left out on a GPU or a CPU."""

CHECK_NAMES = (
    *("window_scores", "gather_kept", "page_checksum", "page_rows", "verify_attention", "packed_decode", "integer_decode"),
    *("packed_gluon", "integer_gluon", "ragged_decode"),
    *("scatter_cells", "pack_blocks", "lynx", "anchored", "whole_blocks"),
    *("verify_attention_is_decode", "verify_backend", "packed_backend", "uneven_backend", "pointers", "choosing", "hand_over"),
    *("quest", "prefill", "specialized_prefill", "coded_keys"),
)
