//! `DEVCOMM_LOG`: messages and operations on the standard error.

use std::io;
use std::sync::OnceLock;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt, registry};

use super::env::{Lookup, log_filter};
use crate::error::Result;

/// Writes messages to the standard error as DEVCOMM_LOG asks, from the first world of the process
/// on: `debug`, or `devcomm_host=debug,devcomm_sim=warn`. At `debug`, each operation of a rank is
/// a line with its duration. A program that has its own subscriber of `tracing` keeps it.
///
/// # Errors
///
/// [`WorldError::Environment`](crate::error::WorldError::Environment) for another value.
pub(super) fn start(var: Lookup<'_>) -> Result<()> {
    static STARTED: OnceLock<()> = OnceLock::new();
    let Some(filter) = log_filter(var)? else { return Ok(()) };
    STARTED.get_or_init(|| subscribe(filter));
    Ok(())
}

fn subscribe(filter: Targets) {
    let lines = fmt::layer().with_writer(io::stderr).with_span_events(FmtSpan::CLOSE);
    // An error: the program has its own subscriber.
    let _ = registry().with(lines.with_filter(filter)).try_init();
}
