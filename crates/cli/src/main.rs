//! `devcomm`: the command line; each command is a module of the library.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use devcomm_cli::{bench::Bench, doctor::Doctor, new::New, ptx::Ptx, setup::Setup};

/// GPU kernels in Rust that communicate by themselves: set up a machine, start a project, inspect
/// its kernels.
#[derive(Parser)]
#[command(name = "devcomm", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Setup(Setup),
    Doctor(Doctor),
    Ptx(Ptx),
    New(New),
    Bench(Bench),
}

fn main() -> ExitCode {
    // A kernel build starts this program again as its LLVM worker.
    cuda_builder::link_worker();
    let done = match Cli::parse().command {
        Command::Setup(setup) => setup.run(),
        Command::Doctor(doctor) => doctor.run("devcomm setup"),
        Command::Ptx(ptx) => ptx.run(),
        Command::New(new) => new.run(),
        Command::Bench(bench) => bench.run(),
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
