//! Runs LLVM in a child process.
//!
//! LLVM aborts the process on unsupported operations (`u128 as f32` on a GPU). So the program
//! starts itself again as a worker with one job, and the builder reports how the worker ended.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::link::{self, Link, PrepareNccl};
use crate::llvm::Llvm;
use crate::signature::{self, Signature};
use crate::split::{self, Split};
use crate::toolchain::Toolchain;

/// The environment variable with the path of a worker's request.
const JOB_VARIABLE: &str = "DEVCOMM_LINK_JOB";

/// Stack size of the worker's thread: LLVM is deeply recursive, and the default is 2 MiB.
const STACK_BYTES: usize = 64 << 20;

/// One job for a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Job {
    Split(Split),
    PrepareNccl(PrepareNccl),
    Link(Link),
    Signatures(PathBuf),
}

/// What a worker reads.
#[derive(Serialize, Deserialize)]
struct WorkerRequest {
    libllvm: PathBuf,
    llvm_version: String,
    job: Job,
    /// The file for the result: JSON of `Result<T, String>`, `T` by the job.
    outcome: PathBuf,
}

/// Returns the exported functions of a bitcode file, by name.
///
/// LLVM reads the file in a child process: call [`link_worker`](crate::link_worker) first in
/// `main`.
///
/// # Errors
///
/// [`Error`] for a missing component of the toolchain, or if the file cannot be read.
pub fn device_functions(bitcode: &Path) -> Result<Vec<Signature>, Error> {
    let toolchain = Toolchain::find(None, None)?;
    let temporary = env::temp_dir();
    let scratch = tempfile::tempdir_in(&temporary);
    let scratch = scratch.map_err(Error::io("create a folder in", &temporary))?;
    let workers = Workers { toolchain: &toolchain, folder: scratch.path().to_owned() };
    let what = format!("cannot list the functions of {}", bitcode.display());
    workers.run("signatures", &what, Job::Signatures(bitcode.to_owned()))
}

/// Starts workers.
#[derive(Debug)]
pub(crate) struct Workers<'a> {
    pub(crate) toolchain: &'a Toolchain,
    /// A folder for requests and results.
    pub(crate) folder: PathBuf,
}

impl Workers<'_> {
    /// Runs a job in a child process. `what` is the start of an error message.
    pub(crate) fn run<T: DeserializeOwned>(
        &self,
        name: &str,
        what: &str,
        job: Job,
    ) -> Result<T, Error> {
        let failed = |message: String| Error::Llvm { what: what.to_owned(), message };
        let outcome = self.folder.join(format!("{name}.outcome.json"));
        let request_path = self.folder.join(format!("{name}.job.json"));
        let request = WorkerRequest {
            libllvm: self.toolchain.libllvm.clone(),
            llvm_version: self.toolchain.llvm_version.clone(),
            job,
            outcome: outcome.clone(),
        };
        let text = serde_json::to_vec(&request).map_err(|e| failed(e.to_string()))?;
        fs::write(&request_path, text).map_err(Error::io("write", &request_path))?;
        let _ = fs::remove_file(&outcome);

        let program = env::current_exe().map_err(|e| failed(e.to_string()))?;
        let arguments: Vec<OsString> = env::args_os().skip(1).collect();
        let output = Command::new(&program)
            .args(arguments)
            .env(JOB_VARIABLE, &request_path)
            .stdin(Stdio::null())
            .output()
            .map_err(|e| failed(format!("cannot start {}: {e}", program.display())))?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        let Ok(text) = fs::read(&outcome) else {
            return Err(failed(exit_message(output.status, &stderr)));
        };
        match serde_json::from_slice::<Result<T, String>>(&text) {
            Ok(result) => result.map_err(failed),
            Err(e) => Err(failed(format!("the worker's result cannot be read: {e}"))),
        }
    }
}

/// Returns the error message for a worker that ended without a result.
fn exit_message(status: ExitStatus, stderr: &str) -> String {
    if status.success() {
        return "the program was started again to run LLVM, and ended without reaching \
                `cuda_builder::link_worker()` or `CudaBuilder::build()`; call the former first \
                in `main`"
            .to_owned();
    }
    let own = stderr.lines().filter_map(|line| line.split_once("LLVM ERROR: "));
    let reason: Vec<&str> = own.map(|(_, reason)| reason).collect();
    if !reason.is_empty() {
        return format!("LLVM aborted: {}", reason.join("\n"));
    }
    let last: Vec<&str> = stderr.lines().rev().take(8).collect();
    let last = last.into_iter().rev().collect::<Vec<_>>().join("\n");
    format!("LLVM's process ended with {status}:\n{last}")
}

/// Runs a worker's job and ends the process, if this process is a worker.
///
/// [`CudaBuilder::build`](crate::CudaBuilder::build) calls it first, which is enough for a build
/// script. A program that does other work before it builds kernels should call it first in its
/// `main`.
pub fn link_worker() {
    let Some(path) = env::var_os(JOB_VARIABLE) else {
        return;
    };
    let work = move || serve(Path::new(&path));
    let worker = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work);
    let served = worker.map_err(|e| e.to_string()).and_then(|thread| {
        thread
            .join()
            .unwrap_or_else(|_| Err("the worker panicked; its message is above".to_owned()))
    });
    if let Err(reason) = &served {
        eprintln!("{reason}");
    }
    std::process::exit(i32::from(served.is_err()));
}

fn serve(path: &Path) -> Result<(), String> {
    let text = fs::read(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let request: WorkerRequest = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
    let options = match &request.job {
        Job::Link(job) => link::BACK_ENDS[job.back_end],
        _ => &[],
    };
    let result = Llvm::load(&request.libllvm, &request.llvm_version, options)
        .and_then(|llvm| do_job(&llvm, &request.job))
        .map_err(|failure| failure.0);
    let text = serde_json::to_vec(&result).map_err(|e| e.to_string())?;
    fs::write(&request.outcome, text)
        .map_err(|e| format!("cannot write {}: {e}", request.outcome.display()))
}

fn do_job(llvm: &Llvm, job: &Job) -> crate::llvm::Result<serde_json::Value> {
    let result = match job {
        Job::Split(job) => serde_json::to_value(split::split(llvm, job)?),
        Job::PrepareNccl(job) => serde_json::to_value(link::prepare_nccl(llvm, job)?),
        Job::Link(job) => serde_json::to_value(link::link(llvm, job)?),
        Job::Signatures(bitcode) => serde_json::to_value(signature::signatures(llvm, bitcode)?),
    };
    result.map_err(|e| crate::llvm::Failure(e.to_string()))
}
