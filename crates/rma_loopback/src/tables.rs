//! The plugin's exported function tables. NCCL looks them up by name and takes the newest it knows.

use crate::abi::{RmaV14, RmaV15, RmaV16};
use crate::entry::{
    NAME, close_coll, close_listen, connect, create_context, dereg_mr_sym, destroy_context,
    devices, finalize, get_properties, get_rma_properties, iflush, iget, iget_v14, init, iput,
    iput_signal, iput_signal_v14, iput_v14, listen, query_last_error, reg_mr_sym,
    reg_mr_sym_dma_buf, rma_progress, test,
};

/// Declares a table: fields common to all versions, and those that differ.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident: $version:ident { $($own:tt)* }) => {
        $(#[$doc])*
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "the name that NCCL looks for")]
        pub static $name: $version = $version {
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
            iflush,
            test,
            rma_progress,
            query_last_error,
            finalize,
            $($own)*
        };
    };
}

table! {
    /// The plugin, for version 16 of the interface (NCCL 2.32).
    ncclRmaPlugin_v16: RmaV16 { get_rma_properties, iput, iput_signal, iget }
}

table! {
    /// The plugin, for version 15 of the interface.
    ncclRmaPlugin_v15: RmaV15 { iput, iput_signal, iget }
}

table! {
    /// The plugin, for version 14 of the interface.
    ncclRmaPlugin_v14: RmaV14 {
        iput: iput_v14,
        iput_signal: iput_signal_v14,
        iget: iget_v14,
    }
}
