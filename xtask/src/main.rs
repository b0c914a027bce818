//! The project's tasks, run as `cargo xtask <task>`: one command to set up, run, test, inspect and
//! pack.
//!
//! This file is the command line; each task is a module.

mod cpp;
mod cuda;
mod doctor;
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
        /// Say nothing when nothing is missing
        #[arg(long)]
        quiet: bool,
        /// Also fetch nvcc, which compiles the C++ twins of kernels
        #[arg(long)]
        twins: bool,
    },
    /// Run an example (setup first); without GPUs it is simulated
    Run {
        /// The example's name; unknown names list them all
        example: String,
        /// Arguments for the example
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run every test (setup first): the fast ones first, those that need GPUs last
    Test,
    /// Show every component with its version, its path and the command that fixes what is missing
    Doctor {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print a kernel's PTX, or write all of it, with a table of what each kernel uses
    #[command(override_usage = "cargo xtask ptx <KERNEL | --all> [--check] [--arch <ARCH>]")]
    Ptx {
        /// The kernel's name
        #[arg(required_unless_present = "all")]
        kernel: Option<String>,
        /// All kernels: their PTX is written to a folder
        #[arg(long, conflicts_with = "kernel")]
        all: bool,
        /// Enforce the rules: no call but of GIN's operations, no stack or spill, launchable, and
        /// assembles for sm_100
        #[arg(long)]
        check: bool,
        /// The architecture to build for instead of the default, e.g. sm_100
        #[arg(long)]
        arch: Option<String>,
    },
    /// Write the list of NCCL's C functions for kernels, from NCCL's device bitcode and headers
    Raw {
        /// Write nothing: fail when the checked-in list is not what NCCL says
        #[arg(long)]
        check: bool,
    },
    /// Compile the kernels that exist in Rust and in CUDA C++ from both (nvcc is fetched), for
    /// `devcomm-bench twins`
    Twins,
    /// Compile and run the programs in CUDA C++ that use NCCL alone (nvcc is fetched): what carries
    /// GIN here carries theirs
    Cpp,
    /// Make a folder that runs examples and GPU tests on a machine with GPUs but no Rust, network
    /// or new NCCL
    Pack {
        /// The most that the folder may hold, e.g. 64M
        #[arg(long, default_value = "64M", value_parser = pack::parse_size)]
        limit: u64,
        /// Cut NCCL's library to one architecture, e.g. sm_90, and compress it
        #[arg(long, value_parser = slim::parse_arch)]
        slim: Option<u32>,
        /// The folder to make, replaced if an earlier pack made it [default: pack in the checkout]
        #[arg(long)]
        out: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    // Kernel builds start this program again, to run LLVM.
    cuda_builder::link_worker();
    let done = match Cli::parse().task {
        Task::Setup { quiet, twins } => setup::setup_all(quiet, twins).map(|()| 0),
        Task::Run { example, args } => run::run(&example, &args),
        Task::Test => test::test(),
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
