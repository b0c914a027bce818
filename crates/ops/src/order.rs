//! The order of launches that use one workspace.

use std::cell::RefCell;

use devcomm_host::{Result, Stream};

/// The stream of the last launch: the workspace is used by one launch at a time.
#[derive(Default)]
pub(crate) struct LastStream(RefCell<Option<Stream>>);

impl LastStream {
    /// Orders a launch behind the last one, if that was on another stream.
    pub(crate) fn order(&self, stream: &Stream) -> Result<()> {
        let mut last = self.0.borrow_mut();
        if last.as_ref().is_some_and(|last| last.as_raw() == stream.as_raw()) {
            return Ok(());
        }
        if let Some(last) = &*last {
            let event = stream.context().event_without_timing()?;
            last.record(&event)?;
            stream.wait_event(&event)?;
        }
        *last = Some(stream.clone());
        Ok(())
    }
}
