//! What the ranks of a collective call tell each other: that all have the same options, and whether
//! one of them has failed.
//!
//! A rank that fails takes part in the next exchange, in which all others get its error instead of
//! waiting for it, so that the ranks' later calls match.

use std::sync::atomic::Ordering;

use bytemuck::Pod;

use super::Communicator;
use super::handle::Status;
use super::peers::{self, Terms};
use crate::error::{Error, Result};

/// A collective call, with options that must be the same on all ranks.
#[doc(hidden)]
#[derive(Clone, Debug)]
#[must_use = "nothing is compared before `agree`"]
pub struct CollectiveCall<'a> {
    communicator: &'a Communicator,
    call: &'a str,
    options: Vec<(String, String)>,
}

impl Communicator {
    /// Returns a collective call, which is compared with those of the other ranks.
    #[doc(hidden)]
    pub fn collective<'a>(&'a self, call: &'a str) -> CollectiveCall<'a> {
        CollectiveCall { communicator: self, call, options: Vec::new() }
    }

    /// Makes a collective call of several steps, in which each rank can fail by itself. It returns
    /// when all ranks have made the steps; if one has failed, all others get an error. Without a
    /// host exchange it only makes the steps. *Collective*.
    ///
    /// # Errors
    ///
    /// Those of `steps`; [`WorldError::CallFailed`](crate::WorldError::CallFailed) if another rank
    /// has failed; the errors of [`barrier`](Self::barrier).
    #[doc(hidden)]
    pub fn together<T>(&self, call: &str, steps: impl FnOnce() -> Result<T>) -> Result<T> {
        if !self.has_peers() {
            return steps();
        }
        let failed = || self.inner.failed_exchanges.load(Ordering::Acquire);
        let before = failed();
        let own = steps();
        if own.is_err() && failed() != before {
            // The other ranks no longer wait for a rank whose exchange has failed.
            return own;
        }
        self.collective(call)
            .exchange::<u8, _>(own.map(|own| (own, Vec::new())))
            .map(|(own, _)| own)
    }

    /// Sends `values` to all ranks, and returns those of each rank, in rank order.
    ///
    /// # Errors
    ///
    /// The errors are those of [`barrier`](Self::barrier).
    pub(super) fn exchange<'a, T: Pod>(
        &self,
        terms: impl Into<Terms<'a>>,
        values: &[T],
    ) -> Result<Vec<Vec<T>>> {
        let exchange = || {
            // The other ranks do not wait for one that no longer takes part.
            self.refuse_ended()?;
            let peers = self.peers().ok_or_else(|| {
                Error::invalid("a communicator without a World has no host exchange")
            })?;
            peers::all_gather(peers, terms, values, &|| self.refuse_aborted())
        };
        exchange().inspect_err(|_| _ = self.inner.failed_exchanges.fetch_add(1, Ordering::AcqRel))
    }

    /// Fails once the communicator has ended.
    pub(super) fn refuse_ended(&self) -> Result<()> {
        let handle = self.handle();
        if handle.status() < Status::Finalized { Ok(()) } else { Err(handle.ended()) }
    }

    /// Returns whether the ranks can exchange on the host.
    #[doc(hidden)]
    #[must_use]
    pub fn has_peers(&self) -> bool {
        self.n_ranks() == 1 || self.peers().is_some()
    }
}

impl CollectiveCall<'_> {
    /// Adds an option, which must be the same on all ranks.
    pub fn option(mut self, name: impl Into<String>, value: impl ToString) -> Self {
        self.options.push((name.into(), value.to_string()));
        self
    }

    /// Adds options, as [`option`](Self::option).
    pub(super) fn options(mut self, options: impl IntoIterator<Item = (String, String)>) -> Self {
        self.options.extend(options);
        self
    }

    /// Returns what this rank has prepared, and a value of each rank; or an error on all ranks.
    /// *Collective*.
    ///
    /// # Errors
    ///
    /// This rank's own error; [`WorldError::CallFailed`](crate::WorldError::CallFailed) if another
    /// rank has one, [`WorldError::OptionsDiffer`](crate::WorldError::OptionsDiffer),
    /// [`WorldError::CallsDiffer`](crate::WorldError::CallsDiffer); the errors of
    /// [`Communicator::barrier`].
    pub fn agree<T, V: Pod>(self, own: Result<(T, V)>) -> Result<(T, Vec<V>)> {
        let (own, all) = self.exchange(own.map(|(own, value)| (own, vec![value])))?;
        Ok((own, all.concat()))
    }

    /// Does the same as [`agree`](Self::agree), with a list of each rank.
    ///
    /// # Errors
    ///
    /// The errors are those of [`agree`](Self::agree).
    pub fn exchange<V: Pod, T>(self, own: Result<(T, Vec<V>)>) -> Result<(T, Vec<Vec<V>>)> {
        let Self { communicator, call, options } = self;
        if communicator.n_ranks() == 1 {
            communicator.refuse_ended()?;
            return own.map(|(own, values)| (own, vec![values]));
        }
        let terms = Terms { call, options: &options, failure: own.as_ref().err() };
        let values = own.as_ref().map_or(&[][..], |(_, values)| values);
        let all = communicator.exchange(terms, values);
        // This rank's own error says more than that of the exchange, which it has caused.
        let (own, _) = own?;
        Ok((own, all?))
    }
}
