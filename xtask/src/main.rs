//! The project's tasks, run as `cargo xtask <task>`: set up, run, test, inspect and pack.
//!
//! This file is the command line; each task is a module.

mod cpp;
mod cuda;
mod doctor;
mod mutants;
mod nvcc;
mod pack;
mod process_group;
mod project;
mod ptx;
mod run;
mod setup;
mod slim;
mod test;
mod twins;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The tasks of devcomm.
#[derive(Parser)]
#[command(bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Fetch what the build needs: rust-src by rustup, NCCL and ptxas by pip into a cache shared by
    /// checkouts
    Setup {
        /// Print nothing if nothing is missing
        #[arg(long)]
        quiet: bool,
        /// Also fetch nvcc, which compiles the C++ twins (the C++ versions of Rust kernels)
        #[arg(long)]
        twins: bool,
    },
    /// Run an example (setup first); without GPUs it is simulated
    Run {
        /// The example's name; for an unknown name, the error lists the examples
        example: String,
        /// Arguments for the example
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run every test (setup first): the fast ones first, those that need GPUs last
    Test,
    /// Plant bugs in the kernels, one at a time: the simulator must find each, and pass the
    /// originals
    Mutants {
        /// The most schedules in which each runs, or a range of them: a long run in parts
        #[arg(long, default_value = "100", value_name = "N|A..B")]
        schedules: String,
        /// Also run the originals that take long in as many; otherwise in one of 20 or 50
        #[arg(long)]
        all: bool,
        /// Only these programs as they are, no mutants; see tests/mutants/programs.rs
        #[arg(long, value_delimiter = ',')]
        programs: Vec<String>,
    },
    /// Show every component with its version, its path and the command that fixes what is missing
    Doctor {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print one kernel's PTX, or write that of all kernels, and print each kernel's resources
    #[command(override_usage = "cargo xtask ptx <KERNEL | --all> [--check] [--arch <ARCH>]")]
    Ptx {
        /// The kernel's name
        #[arg(required_unless_present = "all")]
        kernel: Option<String>,
        /// All kernels: their PTX is written to a folder
        #[arg(long, conflicts_with = "kernel")]
        all: bool,
        /// Fail if a kernel has calls except GIN's operations, stack or spills, cannot be launched,
        /// or does not assemble for sm_100
        #[arg(long)]
        check: bool,
        /// The architecture to build for instead of the default, e.g. sm_100
        #[arg(long)]
        arch: Option<String>,
    },
    /// Write the list of NCCL's C functions for kernels, from NCCL's device bitcode and headers
    Raw {
        /// Write nothing, and fail if the checked-in list is outdated
        #[arg(long)]
        check: bool,
    },
    /// Compile the kernels that exist in Rust and in CUDA C++ from both (nvcc is fetched), for
    /// `devcomm-bench twins`
    Twins,
    /// Compile and run the CUDA C++ programs that use NCCL without devcomm, to show that GIN works
    /// for any program here (nvcc is fetched)
    Cpp,
    /// Make a folder with the examples and GPU tests, to run on a machine with GPUs but no Rust,
    /// network or recent NCCL
    Pack {
        /// The maximum size of the folder, e.g. 64M
        #[arg(long, default_value = "64M", value_parser = pack::parse_size)]
        limit: u64,
        /// Reduce NCCL's library to one GPU architecture, e.g. sm_90, and compress it
        #[arg(long, value_parser = slim::parse_arch)]
        slim: Option<u32>,
        /// The folder to write; an earlier pack is replaced [default: pack in the checkout]
        #[arg(long)]
        out: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    // A kernel build starts this program again as its LLVM worker.
    cuda_builder::link_worker();
    let done = match Cli::parse().task {
        Task::Setup { quiet, twins } => setup::setup_all(quiet, twins).map(|()| 0),
        Task::Run { example, args } => run::run(&example, &args),
        Task::Test => test::test(),
        Task::Mutants { schedules, all, programs } => mutants::mutants(&schedules, all, &programs),
        Task::Doctor { json } => doctor::doctor(json),
        Task::Ptx { kernel, all: _, check, arch } => {
            ptx::ptx(kernel.as_deref(), check, arch.as_deref())
        }
        Task::Raw { check } => setup::setup(true, setup::Optional::Ptxas)
            .and_then(|()| xtask::raw::raw(&project::root(), check)),
        Task::Twins => twins::twins().map(|()| 0),
        Task::Cpp => cpp::cpp().map(|()| 0),
        Task::Pack { limit, slim, out } => pack::pack(limit, slim, out.as_deref()).map(|()| 0),
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
