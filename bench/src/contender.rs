//! Who is compared: something that does what a benchmark is about, with the memory that it works
//! on.

use std::fmt;

use anyhow::Result;
use clap::ValueEnum;
use devcomm::{Kernels, LaunchConfig};
use serde::{Serialize, Serializer};

/// What a contender is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
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

impl Serialize for Variant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// One of those that are compared. What it enqueues is the same in every rank.
pub trait Contender {
    /// What it is.
    fn variant(&self) -> Variant;

    /// Blocks and threads; `None` where NCCL chooses them.
    fn grid(&self) -> Option<(u32, u32)> {
        None
    }

    /// Enqueues what is timed.
    fn enqueue(&self) -> Result<()>;

    /// Operations in what is timed: a row tells the time of one.
    fn operations(&self) -> u32 {
        1
    }

    /// Spoils the result, so that what is not written is wrong.
    fn spoil(&self) -> Result<()>;

    /// Enqueues what is checked.
    fn enqueue_checked(&self) -> Result<()> {
        self.enqueue()
    }

    /// Wrong elements of this rank's result. *Collective*.
    fn count_wrong(&self) -> Result<usize>;
}

/// Boxed, since each benchmark has its own.
pub type Contenders<'a> = Vec<Box<dyn Contender + 'a>>;

/// What a kernel is launched with, whichever compiler it comes from: its memory, arguments and
/// grid.
pub trait Workload {
    /// The grid.
    fn config(&self) -> LaunchConfig;

    /// Registers a thread of the kernel that is timed.
    fn registers(&self, kernels: &Kernels) -> devcomm::Result<u32>;

    /// Launches the kernel that is timed.
    fn launch(&self, kernels: &Kernels) -> devcomm::Result<()>;

    /// As [`Contender::operations`].
    fn operations(&self) -> u32 {
        1
    }

    /// As [`Contender::spoil`].
    fn spoil(&self) -> Result<()>;

    /// Launches the kernel that is checked.
    fn launch_checked(&self, kernels: &Kernels) -> devcomm::Result<()> {
        self.launch(kernels)
    }

    /// As [`Contender::count_wrong`].
    fn count_wrong(&self) -> Result<usize>;
}

/// The contenders that are one workload's kernels.
pub fn by_kernels<'a>(
    kernels: &'a [(Variant, Kernels)],
    workload: &'a dyn Workload,
) -> Contenders<'a> {
    let of = |&(variant, ref kernels): &'a (Variant, Kernels)| {
        Box::new(ByKernel { variant, kernels, workload }) as Box<dyn Contender + 'a>
    };
    kernels.iter().map(of).collect()
}

struct ByKernel<'a> {
    variant: Variant,
    kernels: &'a Kernels,
    workload: &'a dyn Workload,
}

impl Contender for ByKernel<'_> {
    fn variant(&self) -> Variant {
        self.variant
    }

    fn grid(&self) -> Option<(u32, u32)> {
        let config = self.workload.config();
        Some((config.grid.x, config.block.x))
    }

    fn enqueue(&self) -> Result<()> {
        Ok(self.workload.launch(self.kernels)?)
    }

    fn operations(&self) -> u32 {
        self.workload.operations()
    }

    fn spoil(&self) -> Result<()> {
        self.workload.spoil()
    }

    fn enqueue_checked(&self) -> Result<()> {
        Ok(self.workload.launch_checked(self.kernels)?)
    }

    fn count_wrong(&self) -> Result<usize> {
        self.workload.count_wrong()
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
