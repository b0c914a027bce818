//! The driver and settings of connections.

use std::cell::RefCell;
use std::sync::Arc;

use crate::config::Config;
use crate::driver::Driver;
use crate::error::Result;

/// Driver and settings of a connection.
#[derive(Clone)]
pub struct Setup {
    /// The CUDA driver.
    pub driver: Arc<Driver>,
    /// The settings.
    pub config: Config,
}

thread_local! {
    static OVERRIDE: RefCell<Option<Setup>> = const { RefCell::new(None) };
}

impl Setup {
    /// Returns the system's driver and the environment's settings, unless a test has replaced them.
    pub(crate) fn current() -> Result<Self> {
        let replacement = OVERRIDE.with_borrow(Clone::clone);
        match replacement {
            Some(setup) => Ok(setup),
            None => Ok(Self { driver: Driver::system()?, config: Config::from_env()? }),
        }
    }

    /// Makes connections of this thread use this setup from now on; for tests.
    pub fn use_on_this_thread(self) {
        OVERRIDE.set(Some(self));
    }
}
