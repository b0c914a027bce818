//! Who is compared.

use std::fmt;
use std::rc::Rc;

use anyhow::Result;
use clap::ValueEnum;
use devcomm::{FunctionInfo, LaunchConfig};
use serde::Serialize;

/// What a contender is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// A kernel in Rust
    Rust,
    /// A kernel in Rust that puts by stores over NVLink
    RustLsa,
    /// The same kernel in CUDA C++, compiled by `cargo xtask twins`
    Cpp,
    /// NCCL's call on the host, on memory that is not registered
    Nccl,
    /// NCCL's call on the host, on registered symmetric windows
    NcclSym,
}

impl Variant {
    /// The name that the command line has too.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rust => "rust",
            Self::RustLsa => "rust-lsa",
            Self::Cpp => "cpp",
            Self::Nccl => "nccl",
            Self::NcclSym => "nccl-sym",
        }
    }

    /// Whether a kernel does it, and not a call on the host.
    pub fn is_kernel(self) -> bool {
        !matches!(self, Self::Nccl | Self::NcclSym)
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One of those that are compared. What it enqueues is the same in every rank.
pub struct Contender<'a> {
    pub variant: Variant,
    /// Of its own kernel; NCCL chooses by itself.
    pub launch: Option<Launch>,
    /// Operations in what is timed: a row tells the time of one.
    pub operations: u32,
    /// Enqueues what is timed.
    pub timed: Work<'a>,
    /// Enqueues what is checked.
    pub checked: Work<'a>,
    /// What is right or wrong.
    pub outcome: Box<dyn Outcome + 'a>,
}

/// Something to enqueue.
pub type Work<'a> = Rc<dyn Fn() -> devcomm::Result<()> + 'a>;

/// A result in this rank's memory.
pub trait Outcome {
    /// Spoils it, so that what is not written is wrong.
    fn spoil(&self) -> Result<()>;

    /// Its wrong elements. *Collective*.
    fn count_wrong(&self) -> Result<usize>;
}

impl<O: Outcome> Outcome for &O {
    fn spoil(&self) -> Result<()> {
        (**self).spoil()
    }

    fn count_wrong(&self) -> Result<usize> {
        (**self).count_wrong()
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Launch {
    pub blocks: u32,
    pub threads: u32,
    /// A thread's.
    pub registers: u32,
}

impl<'a> Contender<'a> {
    /// Does one operation, timed and checked.
    pub fn new(
        variant: Variant,
        work: impl Fn() -> devcomm::Result<()> + 'a,
        outcome: impl Outcome + 'a,
    ) -> Self {
        let work: Work<'a> = Rc::new(work);
        let (timed, outcome) = (Rc::clone(&work), Box::new(outcome));
        Self { variant, launch: None, operations: 1, timed, checked: work, outcome }
    }

    /// With other work to time than to check, of so many operations.
    pub fn timed(self, operations: u32, work: impl Fn() -> devcomm::Result<()> + 'a) -> Self {
        Self { operations, timed: Rc::new(work), ..self }
    }

    /// By this kernel.
    pub fn by_kernel(self, config: LaunchConfig, info: FunctionInfo) -> Self {
        let (blocks, threads) = (config.grid.x, config.block.x);
        Self { launch: Some(Launch { blocks, threads, registers: info.registers }), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_command_line() {
        for variant in Variant::value_variants() {
            assert_eq!(variant.to_possible_value().unwrap().get_name(), variant.name());
        }
    }
}
