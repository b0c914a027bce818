//! The driver and the settings that connections get.

use std::cell::RefCell;
use std::sync::Arc;

use crate::config::Config;
use crate::driver::Driver;
use crate::error::Result;

/// What a connection works with.
#[derive(Clone)]
pub struct Setup {
    /// The CUDA driver.
    pub driver: Arc<Driver>,
    /// The settings.
    pub config: Config,
}

thread_local! {
    static INSTEAD: RefCell<Option<Setup>> = const { RefCell::new(None) };
}

impl Setup {
    /// This machine's driver, and what the environment says.
    pub(crate) fn current() -> Result<Self> {
        let instead = INSTEAD.with_borrow(Clone::clone);
        match instead {
            Some(setup) => Ok(setup),
            None => Ok(Self { driver: Driver::system()?, config: Config::from_env()? }),
        }
    }

    /// Is what connections of this thread get from now on: for tests.
    pub fn use_on_this_thread(self) {
        INSTEAD.set(Some(self));
    }
}
