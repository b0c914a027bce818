//! NCCL's configuration structs, together with the memory that their pointers point to.
//!
//! That memory is in vectors: a vector that moves keeps its elements and pointers to them, where a
//! moved box would invalidate them.

use std::ffi::{CString, c_int};
use std::ptr::{from_mut, null, null_mut};

use devcomm_sys::nccl::{CollConfig, Config, ConfigExt, ConfigExtValue};

/// A communicator's configuration.
#[derive(Debug)]
pub(crate) struct LoweredConfig {
    raw: Config,
    /// The strings that `raw` points to.
    _texts: Vec<Option<CString>>,
}

// SAFETY: the pointers in `raw` lead to `_texts`, which `self` owns and never changes.
unsafe impl Send for LoweredConfig {}

impl LoweredConfig {
    pub(crate) fn new(
        mut raw: Config,
        net_name: Option<CString>,
        comm_name: Option<CString>,
    ) -> Self {
        let texts = vec![net_name, comm_name];
        let address = |text: &Option<CString>| text.as_ref().map_or(null(), |text| text.as_ptr());
        (raw.net_name, raw.comm_name) = (address(&texts[0]), address(&texts[1]));
        Self { raw, _texts: texts }
    }

    /// Returns the pointer for NCCL, valid while `self` lives and is not moved.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut Config {
        &raw mut self.raw
    }

    #[cfg(test)]
    pub(crate) fn raw(&self) -> &Config {
        &self.raw
    }
}

/// The value of a vendor-specific option.
#[derive(Debug)]
pub(crate) enum LoweredValue {
    Int(c_int),
    Text(CString),
}

/// A collective's configuration.
pub(crate) struct LoweredCollectiveConfig {
    raw: CollConfig,
    /// The list `raw.ext`: each node points to the next one, and perhaps into `values`.
    _nodes: Vec<ConfigExt>,
    values: Vec<LoweredValue>,
    _selection: Vec<CString>,
}

// SAFETY: the pointers in `raw` and in the nodes lead to memory that `self` owns and never changes;
// the event's address is not dereferenced here.
unsafe impl Send for LoweredCollectiveConfig {}
// SAFETY: as above; nothing can be changed through a shared reference.
unsafe impl Sync for LoweredCollectiveConfig {}

impl LoweredCollectiveConfig {
    /// Returns a configuration; `options` are (vendor, option, value), in the order of NCCL's list.
    pub(crate) fn new(
        mut raw: CollConfig,
        selection: Option<CString>,
        options: Vec<(c_int, c_int, LoweredValue)>,
    ) -> Self {
        let (keys, values): (Vec<_>, Vec<_>) =
            options.into_iter().map(|(vendor, option, value)| ((vendor, option), value)).unzip();
        let mut nodes: Vec<ConfigExt> = std::iter::zip(keys, &values)
            .map(|((vendor_id, option_id), value)| {
                // Initialises every byte of the union.
                let mut stored = ConfigExtValue { raw: null_mut() };
                match value {
                    LoweredValue::Int(int) => stored.int = *int,
                    LoweredValue::Text(text) => stored.text = text.as_ptr(),
                }
                ConfigExt { next: null_mut(), vendor_id, option_id, value: stored }
            })
            .collect();
        let mut next = null_mut();
        for node in nodes.iter_mut().rev() {
            node.next = next;
            next = from_mut(node);
        }
        raw.ext = next;
        let selection = Vec::from_iter(selection);
        raw.alg_selection = selection.first().map_or(null(), |text| text.as_ptr());
        Self { raw, _nodes: nodes, values, _selection: selection }
    }

    /// Returns the pointer for NCCL, valid while `self` lives and is not moved.
    pub(crate) fn as_ptr(&self) -> *const CollConfig {
        &raw const self.raw
    }

    #[cfg(test)]
    pub(crate) fn raw(&self) -> &CollConfig {
        &self.raw
    }
}

impl std::fmt::Debug for LoweredCollectiveConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} with options {:?}", self.raw, self.values)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn a_list_and_its_texts_are_whole_after_a_move_and_on_another_thread() {
        let text = |text: &str| CString::new(text).unwrap();
        let options = vec![
            (1, 10, LoweredValue::Int(-5)),
            (1, 11, LoweredValue::Text(text("fast"))),
            (2, 10, LoweredValue::Int(7)),
        ];
        let config = LoweredCollectiveConfig::new(CollConfig::new(), Some(text("ring")), options);
        let moved = Box::new(config);
        let (keys, values, selection) = std::thread::spawn(move || {
            let (mut keys, mut values, mut node) = (Vec::new(), Vec::new(), moved.raw.ext);
            while !node.is_null() {
                // SAFETY: the list lives as long as `moved`; the second value is the text.
                unsafe {
                    keys.push(((*node).vendor_id, (*node).option_id));
                    values.push(match keys.len() {
                        2 => CStr::from_ptr((*node).value.text).to_str().unwrap().to_owned(),
                        _ => (*node).value.int.to_string(),
                    });
                    node = (*node).next;
                }
            }
            // SAFETY: it lives as long as `moved`.
            let selection = unsafe { CStr::from_ptr(moved.raw.alg_selection) };
            (keys, values, selection.to_owned())
        })
        .join()
        .unwrap();
        assert_eq!(keys, [(1, 10), (1, 11), (2, 10)]);
        assert_eq!(values, ["-5", "fast", "7"]);
        assert_eq!(selection.to_str().unwrap(), "ring");
    }

    #[test]
    fn without_options_and_texts_every_pointer_is_null() {
        let collective = LoweredCollectiveConfig::new(CollConfig::new(), None, Vec::new());
        assert!(collective.raw.ext.is_null() && collective.raw.alg_selection.is_null());
        let config = LoweredConfig::new(Config::new(), None, None);
        assert!(config.raw.net_name.is_null() && config.raw.comm_name.is_null());
    }
}
