//! SIGINT, SIGTERM and SIGHUP, unless this process ignores them: recorded while local jobs run,
//! with their default action otherwise, or that of the program's own handler.
//! SIGUSR1: ranks print what they do; local jobs pass it on to their ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::{SigId, iterator};

use crate::device::recorder;
use crate::error::{Error, Result};
use crate::sys::process;

/// The signals that end local jobs.
const ENDING: [(i32, &str); 3] = [(SIGINT, "SIGINT"), (SIGTERM, "SIGTERM"), (SIGHUP, "SIGHUP")];

/// State shared by the handlers of this process. They are installed with the first job and never
/// removed, because `signal_hook` would then leave the signals without any effect.
struct Handlers {
    /// The last signal, 0 for none.
    seen: Arc<AtomicUsize>,
    /// Whether no job runs, so that a signal has its default action.
    idle: Arc<AtomicBool>,
    /// The number of jobs that run.
    jobs: usize,
}

static HANDLERS: Mutex<Option<Handlers>> = Mutex::new(None);

impl Handlers {
    fn install() -> Result<Self> {
        let handlers =
            Self { seen: Arc::default(), idle: Arc::new(AtomicBool::new(true)), jobs: 0 };
        for (signal, name) in ENDING {
            // As for every program under `nohup`, what is ignored stays so.
            if process::ignores(signal) {
                continue;
            }
            let (seen, idle) = (Arc::clone(&handlers.seen), Arc::clone(&handlers.idle));
            let refused = |error| refused(name, &error);
            // A handler of the program's own is called as before.
            if !process::handles(signal) {
                signal_hook::flag::register_conditional_default(signal, idle).map_err(refused)?;
            }
            signal_hook::flag::register_usize(signal, seen, signal as usize).map_err(refused)?;
        }
        Ok(handlers)
    }
}

fn refused(name: &str, error: &std::io::Error) -> Error {
    Error::invalid(format!("{name} cannot be handled: {error}"))
}

/// Records signals while it exists. One signal ends all jobs of the process.
pub(super) struct Signals {
    seen: Arc<AtomicUsize>,
    /// Whether SIGUSR1 has come.
    asked: Arc<AtomicBool>,
    /// The handler that sets `asked`.
    handler: SigId,
}

impl Signals {
    pub(super) fn watch() -> Result<Self> {
        let asked = Arc::default();
        let handler = signal_hook::flag::register(SIGUSR1, Arc::clone(&asked))
            .map_err(|error| refused("SIGUSR1", &error))?;
        let mut installed = HANDLERS.lock();
        let handlers = match &mut *installed {
            Some(handlers) => handlers,
            none => none.insert(Handlers::install()?),
        };
        handlers.jobs += 1;
        if handlers.jobs == 1 {
            // In this order: once `idle` is false, a signal is recorded.
            handlers.seen.store(0, Ordering::SeqCst);
            handlers.idle.store(false, Ordering::SeqCst);
        }
        Ok(Self { seen: Arc::clone(&handlers.seen), asked, handler })
    }

    /// Returns whether SIGUSR1 has come since the last call.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.swap(false, Ordering::SeqCst)
    }

    /// Returns the name of the signal that ends the jobs, if one has come.
    pub(super) fn seen(&self) -> Option<&'static str> {
        let seen = self.seen.load(Ordering::SeqCst);
        ENDING.iter().find(|(signal, _)| *signal as usize == seen).map(|(_, name)| *name)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // From now on SIGUSR1 has no effect: signal_hook's handler stays, without an action.
        signal_hook::low_level::unregister(self.handler);
        if let Some(handlers) = &mut *HANDLERS.lock() {
            handlers.jobs -= 1;
            handlers.idle.store(handlers.jobs == 0, Ordering::SeqCst);
        }
    }
}

/// While one exists, SIGUSR1 makes this process print the last operations of its ranks.
pub(super) struct Printer(());

/// The number of [`Printer`]s, and the thread that they share.
static PRINTERS: Mutex<(usize, Option<PrinterThread>)> = Mutex::new((0, None));

struct PrinterThread {
    signals: iterator::Handle,
    thread: JoinHandle<()>,
}

impl PrinterThread {
    fn start() -> std::io::Result<Self> {
        let mut signals = iterator::Signals::new([SIGUSR1])?;
        let handle = signals.handle();
        let print = move || signals.forever().for_each(|_| recorder::print_all());
        let thread = std::thread::Builder::new().name("devcomm-signals".to_owned()).spawn(print)?;
        Ok(Self { signals: handle, thread })
    }
}

impl Printer {
    pub(super) fn start() -> Self {
        let mut printers = PRINTERS.lock();
        printers.0 += 1;
        if printers.0 == 1 {
            match PrinterThread::start() {
                Ok(printing) => printers.1 = Some(printing),
                Err(error) => tracing::warn!("SIGUSR1 cannot be handled: {error}"),
            }
        }
        Self(())
    }
}

impl Drop for Printer {
    fn drop(&mut self) {
        let mut printers = PRINTERS.lock();
        printers.0 -= 1;
        if printers.0 == 0
            && let Some(PrinterThread { signals, thread }) = printers.1.take()
        {
            // The thread ends, so that the process may have one thread again.
            signals.close();
            let _ = thread.join();
        }
    }
}
