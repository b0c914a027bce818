//! The project's tasks, run as `cargo xtask <task>`: set up, run, test, inspect and pack.
//!
//! This file is the command line; each task is a module, here or, if users need it too, of
//! `devcomm-cli`.

mod cpp;
mod kernels_bin;
mod mpich;
mod mutants;
mod nvcc;
mod pack;
mod process_group;
mod release;
mod run;
mod slim;
mod test;
mod twins;
mod wheel;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use devcomm_cli::setup::{self, Setup};
use devcomm_cli::{doctor::Doctor, new::New, ptx::Ptx};
use xtask::project;

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
        #[command(flatten)]
        setup: Setup,
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
        /// Also run the slow originals in all of these schedules; otherwise in one of 20 or 50
        #[arg(long)]
        all: bool,
        /// Only the originals of these programs, and no mutants; see tests/mutants/programs.rs
        #[arg(long, value_delimiter = ',')]
        programs: Vec<String>,
    },
    Doctor(Doctor),
    #[command(override_usage = "cargo xtask ptx <KERNEL | --all> [--check] [--arch <ARCH>]")]
    Ptx(Ptx),
    New(New),
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
    /// Compile the kernels into the package of the feature `kernels-bin`, with which programs and
    /// the wheel need no compiler for kernels
    KernelsBin {
        /// Write nothing: compile them again, with nothing cached, and fail unless the package has
        /// the same bytes
        #[arg(long)]
        check: bool,
    },
    /// Check what must hold before the crates are published: packages, a project on the packages
    /// alone, documentation without NCCL, the minimum Rust version, the wheel for Python,
    /// cargo-deny, cargo-semver-checks
    ReleaseCheck,
    /// Make a folder with the examples and GPU tests, to run on a machine with GPUs but no Rust,
    /// network or recent NCCL
    Pack {
        /// The maximum size of the folder, e.g. 80M
        #[arg(long, default_value = "80M", value_parser = pack::parse_size)]
        limit: u64,
        /// Reduce NCCL's library to one GPU architecture, e.g. sm_90, and compress it
        #[arg(long, value_parser = slim::parse_arch)]
        slim: Option<u32>,
        /// Add this wheel for Python, which maturin has built in the folder python, and its tests
        #[arg(long)]
        wheel: Option<PathBuf>,
        /// The folder to write; an earlier pack is replaced [default: pack in the checkout]
        #[arg(long)]
        out: Option<PathBuf>,
    },
}

/// The package of the kernels.
const KERNELS: &str = "devcomm-kernels";

/// Returns `cargo xtask setup`: everything, and with `twins` nvcc too.
fn set_up(setup: &Setup, twins: bool) -> anyhow::Result<u8> {
    setup.run()?;
    if twins {
        let nvcc = nvcc::find_or_fetch()?;
        if !setup.quiet {
            println!("{:<9} {} ({})", "nvcc", nvcc.path.display(), nvcc.version);
        }
    }
    Ok(0)
}

fn main() -> ExitCode {
    // A kernel build starts this program again as its LLVM worker.
    cuda_builder::link_worker();
    let done = match Cli::parse().task {
        Task::Setup { setup, twins } => set_up(&setup, twins),
        Task::Run { example, args } => run::run(&example, &args),
        Task::Test => test::test(),
        Task::Mutants { schedules, all, programs } => mutants::mutants(&schedules, all, &programs),
        Task::Doctor(doctor) => doctor.run("cargo xtask setup"),
        Task::Ptx(mut ptx) => {
            ptx.package.get_or_insert_with(|| KERNELS.to_owned());
            ptx.folder = Some(project::root());
            ptx.run()
        }
        Task::New(mut new) => {
            // The crates of this checkout, published or not.
            new.crates.get_or_insert_with(project::root);
            new.run()
        }
        Task::Raw { check } => setup::setup(true, setup::Optional::Ptxas)
            .and_then(|()| xtask::raw::raw(&project::root(), check)),
        Task::Twins => twins::twins().map(|()| 0),
        Task::Cpp => cpp::cpp().map(|()| 0),
        Task::KernelsBin { check } => kernels_bin::kernels_bin(check).map(|()| 0),
        Task::ReleaseCheck => release::release_check(),
        Task::Pack { limit, slim, wheel, out } => {
            pack::pack(limit, slim, wheel.as_deref(), out.as_deref()).map(|()| 0)
        }
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn every_command_parses() {
        super::Cli::command().debug_assert();
    }
}
