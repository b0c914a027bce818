//! The order of launches that use one workspace.

use std::cell::RefCell;

use devcomm_host::{Result, Stream};

/// The stream of the last launch: the workspace is used by one launch at a time.
#[derive(Default)]
pub(crate) struct LastStream(RefCell<Option<Stream>>);

impl LastStream {
    /// Orders a launch behind the last one, if that was on another stream. A captured launch runs
    /// with its graph, and what was launched before must have ended by then: the capture does not
    /// order them.
    pub(crate) fn order(&self, stream: &Stream) -> Result<()> {
        let mut last = self.0.borrow_mut();
        if last.as_ref().is_some_and(|last| last.as_raw() == stream.as_raw()) {
            return Ok(());
        }
        if let Some(last) = &*last
            && !stream.is_capturing()?
            && !last.is_capturing()?
        {
            let event = stream.context().event_without_timing()?;
            last.record(&event)?;
            stream.wait_event(&event)?;
        }
        *last = Some(stream.clone());
        Ok(())
    }
}
