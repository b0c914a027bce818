//! Reads `ncclConfig_t` (the fields that the simulator uses), C strings and linked lists.

use std::ffi::{CStr, c_char, c_int};
use std::fmt::Write;

use devcomm_sys::nccl::{API_MAGIC, Config, UNDEF_INT};

use super::call::{NcclError, NcclResult};

/// The settings of a communicator.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) blocking: bool,
    /// Contexts for host one-sided operations, and signals per context.
    pub(super) rma_contexts: c_int,
    pub(super) rma_signals: c_int,
    /// Whether one-sided operations work before the first window.
    pub(super) rma_eager: bool,
    pub(super) name: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { blocking: true, rma_contexts: 1, rma_signals: 1, rma_eager: false, name: None }
    }
}

impl Settings {
    /// Reads a configuration; takes undefined fields from `parent`.
    ///
    /// # Safety
    ///
    /// `config` is NULL, or a configuration whose strings are NULL or NUL-terminated.
    pub(super) unsafe fn read(config: *const Config, parent: Self) -> NcclResult<Self> {
        // SAFETY: the caller passes NULL or a valid configuration, whose texts end with a zero.
        let Some(config) = (unsafe { config.as_ref() }) else { return Ok(parent) };
        if config.size != size_of::<Config>() || config.magic != API_MAGIC {
            return Err(NcclError::argument("the configuration was not initialized"));
        }
        let number = |value: c_int, default: c_int, min: c_int| match value {
            UNDEF_INT => Ok(default),
            value if value >= min => Ok(value),
            value => Err(NcclError::argument(format!("invalid value {value} in a configuration"))),
        };
        Ok(Self {
            blocking: number(config.blocking, parent.blocking.into(), 0)? != 0,
            rma_contexts: number(config.num_rma_ctx, parent.rma_contexts, 0)?,
            rma_signals: number(config.num_rma_sig, parent.rma_signals, 1)?,
            rma_eager: number(config.rma_eager_init, parent.rma_eager.into(), 0)? != 0,
            // SAFETY: the caller passes NULL or a valid configuration, whose texts end with a zero.
            name: unsafe { text_of(config.comm_name) }.or(parent.name),
        })
    }

    /// Returns a configuration's fields, for the record of calls.
    ///
    /// # Safety
    ///
    /// The contract is that of [`read`](Self::read).
    pub(super) unsafe fn describe(config: *const Config) -> String {
        // SAFETY: the caller passes NULL or a valid configuration, whose texts end with a zero.
        let Some(config) = (unsafe { config.as_ref() }) else { return String::new() };
        let mut shown = String::new();
        let numbers = [
            ("blocking", config.blocking),
            ("min_ctas", config.min_ctas),
            ("max_ctas", config.max_ctas),
        ];
        for (name, value) in numbers.into_iter().filter(|(_, value)| *value != UNDEF_INT) {
            let _ = write!(shown, " {name} {value}");
        }
        for (name, value) in [("net", config.net_name), ("name", config.comm_name)] {
            // SAFETY: the caller passes NULL or a valid configuration, whose texts end with a zero.
            if let Some(value) = unsafe { text_of(value) } {
                let _ = write!(shown, " {name} {value}");
            }
        }
        if shown.is_empty() { shown } else { format!(" config{shown}") }
    }
}

/// Returns a C string; `None` for NULL.
///
/// # Safety
///
/// `text` is NULL or NUL-terminated.
pub(super) unsafe fn text_of(text: *const c_char) -> Option<String> {
    // SAFETY: the caller passes NULL or text with a zero at its end.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Returns the nodes of a linked list.
///
/// # Safety
///
/// `node` is NULL or a node, and so is `next` of each.
pub(super) unsafe fn list<T: Copy>(mut node: *mut T, next: impl Fn(&T) -> *mut T) -> Vec<T> {
    let mut nodes = Vec::new();
    // SAFETY: the caller passes NULL or a list whose nodes are valid.
    while let Some(this) = unsafe { node.as_ref() } {
        nodes.push(*this);
        node = next(this);
    }
    nodes
}
