//! What is settled before a world looks at its GPUs.

use super::world::World;
use crate::{GinLoopback, Result};

/// Settings of a [`World`] that NCCL and the CUDA driver read once, from the environment. See [`World::builder`].
#[derive(Clone, Debug, Default)]
#[must_use = "a builder makes a world only by from_env, threads or spawn_local"]
pub struct WorldBuilder {
    gin_loopback: Option<GinLoopback>,
}

impl WorldBuilder {
    /// Kernels reach the network (GIN) by devcomm's plugin, which needs no network card.
    pub fn gin_loopback(mut self, loopback: GinLoopback) -> Self {
        self.gin_loopback = Some(loopback);
        self
    }

    /// As [`World::from_env`].
    ///
    /// # Errors
    ///
    /// As [`World::from_env`]; [`Error::GinLoopbackNotFound`](crate::Error::GinLoopbackNotFound),
    /// [`Error::EnvironmentInUse`](crate::Error::EnvironmentInUse), [`Error::Environment`](crate::Error::Environment).
    pub fn from_env(self) -> Result<World> {
        self.settle()?;
        World::from_env()
    }

    /// As [`World::threads`].
    ///
    /// # Errors
    ///
    /// As [`World::threads`], and as [`from_env`](Self::from_env) for the settings.
    pub fn threads(self, n: usize) -> Result<World> {
        self.settle()?;
        World::threads(n)
    }

    /// As [`World::spawn_local`]; the processes inherit the settings.
    ///
    /// # Errors
    ///
    /// As [`World::spawn_local`], and as [`from_env`](Self::from_env) for the settings.
    pub fn spawn_local(self, n: usize) -> Result<()> {
        self.settle()?;
        World::spawn_local(n)
    }

    fn settle(&self) -> Result<()> {
        self.gin_loopback.as_ref().map_or(Ok(()), GinLoopback::enable)
    }
}
