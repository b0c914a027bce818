//! The tables that NCCL looks for in the library, by name; it takes the newest that it knows.

use crate::abi::{RmaV14, RmaV15, RmaV16};
use crate::entry::{
    NAME, close_coll, close_listen, connect, create_context, dereg_mr_sym, destroy_context,
    devices, finalize, get_properties, get_rma_properties, iflush, iget, iget_v14, init, iput,
    iput_signal, iput_signal_v14, iput_v14, listen, query_last_error, reg_mr_sym,
    reg_mr_sym_dma_buf, rma_progress, test,
};

/// The plugin, for NCCL 2.32.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the name that NCCL looks for")]
pub static ncclRmaPlugin_v16: RmaV16 = RmaV16 {
    name: NAME.as_ptr(),
    init,
    devices,
    get_rma_properties,
    get_properties,
    listen,
    connect,
    create_context,
    reg_mr_sym,
    reg_mr_sym_dma_buf,
    dereg_mr_sym,
    destroy_context,
    close_coll,
    close_listen,
    iput,
    iput_signal,
    iget,
    iflush,
    test,
    rma_progress,
    query_last_error,
    finalize,
};

/// The plugin, one version of the interface earlier.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the name that NCCL looks for")]
pub static ncclRmaPlugin_v15: RmaV15 = RmaV15 {
    name: NAME.as_ptr(),
    init,
    devices,
    get_properties,
    listen,
    connect,
    create_context,
    reg_mr_sym,
    reg_mr_sym_dma_buf,
    dereg_mr_sym,
    destroy_context,
    close_coll,
    close_listen,
    iput,
    iput_signal,
    iget,
    iflush,
    test,
    rma_progress,
    query_last_error,
    finalize,
};

/// The plugin, two versions of the interface earlier.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the name that NCCL looks for")]
pub static ncclRmaPlugin_v14: RmaV14 = RmaV14 {
    name: NAME.as_ptr(),
    init,
    devices,
    get_properties,
    listen,
    connect,
    create_context,
    reg_mr_sym,
    reg_mr_sym_dma_buf,
    dereg_mr_sym,
    destroy_context,
    close_coll,
    close_listen,
    iput: iput_v14,
    iput_signal: iput_signal_v14,
    iget: iget_v14,
    iflush,
    test,
    rma_progress,
    query_last_error,
    finalize,
};
