//! SIGINT, SIGTERM and SIGHUP: recorded while local jobs run, with their default action otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::error::{Error, Result};

const ENDING: [(i32, &str); 3] = [(SIGINT, "SIGINT"), (SIGTERM, "SIGTERM"), (SIGHUP, "SIGHUP")];

/// State shared by the handlers of this process. They are installed with the first job and never
/// removed, because `signal_hook` would then leave the signals without any effect.
struct Handlers {
    /// The last signal, 0 for none.
    seen: Arc<AtomicUsize>,
    /// Whether no job runs: a signal then has its default action.
    idle: Arc<AtomicBool>,
    jobs: usize,
}

static HANDLERS: Mutex<Option<Handlers>> = Mutex::new(None);

impl Handlers {
    fn install() -> Result<Self> {
        let handlers =
            Self { seen: Arc::default(), idle: Arc::new(AtomicBool::new(true)), jobs: 0 };
        for (signal, name) in ENDING {
            let (seen, idle) = (Arc::clone(&handlers.seen), Arc::clone(&handlers.idle));
            signal_hook::flag::register_conditional_default(signal, idle)
                .and_then(|_| signal_hook::flag::register_usize(signal, seen, signal as usize))
                .map_err(|error| Error::invalid(format!("{name} cannot be handled: {error}")))?;
        }
        Ok(handlers)
    }
}

/// Records signals while it exists. One signal ends all jobs of the process.
pub(super) struct Signals {
    seen: Arc<AtomicUsize>,
}

impl Signals {
    pub(super) fn watch() -> Result<Self> {
        let mut installed = HANDLERS.lock();
        let handlers = match &mut *installed {
            Some(handlers) => handlers,
            none => none.insert(Handlers::install()?),
        };
        handlers.jobs += 1;
        if handlers.jobs == 1 {
            handlers.seen.store(0, Ordering::SeqCst);
            handlers.idle.store(false, Ordering::SeqCst);
        }
        Ok(Self { seen: Arc::clone(&handlers.seen) })
    }

    pub(super) fn seen(&self) -> Option<&'static str> {
        let seen = self.seen.load(Ordering::SeqCst);
        ENDING.iter().find(|(signal, _)| *signal as usize == seen).map(|(_, name)| *name)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        if let Some(handlers) = &mut *HANDLERS.lock() {
            handlers.jobs -= 1;
            handlers.idle.store(handlers.jobs == 0, Ordering::SeqCst);
        }
    }
}
