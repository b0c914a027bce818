//! The names and arguments of cooperative calls, for the simulator's checks. A GPU has none.

/// A cooperative call of this crate's typed layer: what the kernel called, and arguments that must
/// be equal in all threads of the coop.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoopCall {
    /// The call, such as `barrier.sync`.
    pub name: &'static str,
    /// Names and values of arguments, printed as signed numbers; those without a name are unused.
    pub args: [(&'static str, u64); 6],
}

#[cfg(not(target_arch = "nvptx64"))]
impl CoopCall {
    /// Returns a call without arguments.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self { name, args: [("", 0); 6] }
    }

    /// Adds an argument, or leaves it out if the array is full.
    #[must_use]
    pub fn arg(mut self, name: &'static str, value: u64) -> Self {
        if let Some(free) = self.args.iter_mut().find(|(name, _)| name.is_empty()) {
            *free = (name, value);
        }
        self
    }

    /// Tells the simulator that the running thread makes this call, until the guard is dropped.
    #[track_caller]
    pub(crate) fn begin(self, coop: &crate::raw::CoopAny) -> Guard {
        (crate::raw::host::checks().begin_call)(coop, self);
        Guard
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl std::fmt::Display for CoopCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.name)?;
        let named = self.args.iter().filter(|(name, _)| !name.is_empty());
        for (i, (name, value)) in named.clone().enumerate() {
            let before = if i == 0 { " (" } else { ", " };
            write!(f, "{before}{name} {}", *value as i64)?;
        }
        if named.count() > 0 { write!(f, ")") } else { Ok(()) }
    }
}

/// Ends a call that [`CoopCall::begin`] began.
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) struct Guard;

#[cfg(not(target_arch = "nvptx64"))]
impl Drop for Guard {
    fn drop(&mut self) {
        (crate::raw::host::checks().end_call)();
    }
}

/// An empty type: a GPU needs no name of the call.
#[cfg(target_arch = "nvptx64")]
#[derive(Clone, Copy)]
pub(crate) struct CoopCall;

#[cfg(target_arch = "nvptx64")]
impl CoopCall {
    pub(crate) const fn new(_name: &'static str) -> Self {
        Self
    }

    pub(crate) const fn arg(self, _name: &'static str, _value: u64) -> Self {
        self
    }

    pub(crate) const fn begin(self, _coop: &crate::raw::CoopAny) {}
}
