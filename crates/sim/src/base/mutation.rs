//! Mutations: changes of a kernel that plant a bug, to test that tests, or the simulator, find it.

use cuda_std::arch::{Access, Order, Scope};

use crate::base::error::Site;

/// A change of what kernels do at one line of their source, without compiling them again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mutation {
    file: String,
    line: u32,
    change: Change,
}

/// The change that a [`Mutation`] makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// Removes the operations: stores, barriers, fences, waits, posts; a load reads zero.
    Remove,
    /// Removes the waits: each ends at once, and orders nothing.
    NoWait,
    /// Makes atomic accesses, and GIN's waits, barriers and posts, relaxed, and removes fences.
    Relax,
    /// Narrows the scope of atomic accesses and fences.
    Narrow(Scope),
    /// Moves the address of each access by this multiple of the access's size.
    Shift(isize),
    /// Adds this number to the ids of the GIN signals that operations send.
    Signal(i32),
}

impl Mutation {
    /// Returns a change at a line (from 1) of a file, whose path ends with `file`.
    pub fn new(file: impl Into<String>, line: u32, change: Change) -> Self {
        Self { file: file.into(), line, change }
    }

    /// Returns the change of operations at `at`.
    #[inline]
    pub(crate) fn at(&self, at: Site) -> Option<Change> {
        (at.line() == self.line && at.file().ends_with(&self.file)).then_some(self.change)
    }

    /// Returns whether waits at `at` end at once.
    pub(crate) fn skips_wait(&self, at: Site) -> bool {
        matches!(self.at(at), Some(Change::Remove | Change::NoWait))
    }

    /// Returns whether other operations at `at` are removed.
    pub(crate) fn removes(&self, at: Site) -> bool {
        matches!(self.at(at), Some(Change::Remove))
    }
}

impl Change {
    /// Returns the changed order of an access, a wait or a fence.
    pub(crate) fn order(self, order: Order) -> Order {
        if self == Self::Relax { Order::Relaxed } else { order }
    }

    /// Returns the changed scope.
    fn scope(self, scope: Scope) -> Scope {
        if let Self::Narrow(scope) = self { scope } else { scope }
    }

    /// Returns the changed kind of an access.
    pub(crate) fn access(self, access: Access) -> Access {
        match access {
            Access::AtomicRead(order, scope) => {
                Access::AtomicRead(self.order(order), self.scope(scope))
            }
            Access::AtomicWrite(order, scope) => {
                Access::AtomicWrite(self.order(order), self.scope(scope))
            }
            Access::AtomicRmw(order, scope) => {
                Access::AtomicRmw(self.order(order), self.scope(scope))
            }
            other => other,
        }
    }

    /// Returns the changed fence, unless it is removed.
    pub(crate) fn fence(self, order: Order, scope: Scope) -> Option<(Order, Scope)> {
        let removed = matches!(self, Self::Remove | Self::Relax);
        (!removed).then(|| (order, self.scope(scope)))
    }
}
