//! What was measured on: printed before the table, and part of the JSON.

use std::process::Command;

use anyhow::Result;
use devcomm::Rank;
use serde::Serialize;

/// The machine and the software, as rank 0 sees them.
#[derive(Clone, Debug, Serialize)]
pub struct Header {
    /// The GPU's name.
    pub gpu: String,
    /// Driver, clocks and power limit as nvidia-smi tells them; empty without it.
    pub gpu_state: String,
    /// The NCCL in use.
    pub nccl: String,
    /// Ranks.
    pub ranks: usize,
    /// Ranks that reach each other by load and store.
    pub lsa_ranks: usize,
    /// Hosts.
    pub hosts: usize,
    /// Whether the ranks are threads of one process.
    pub one_process: bool,
    /// Whether multicast over NVLink (NVLS) is there.
    pub multimem: bool,
}

/// What nvidia-smi is asked for.
const STATE: &str = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit";

impl Header {
    /// Asks the rank, its GPU and nvidia-smi.
    pub fn of(rank: &Rank, one_process: bool) -> Result<Self> {
        let properties = rank.communicator()?.properties()?;
        let mut hosts = rank.hosts().to_vec();
        hosts.sort();
        hosts.dedup();
        Ok(Self {
            gpu: rank.context().device_name()?,
            gpu_state: gpu_state(rank.device()).unwrap_or_default(),
            nccl: rank.library().version().to_string(),
            ranks: rank.n_ranks(),
            lsa_ranks: properties.lsa_size(),
            hosts: hosts.len(),
            one_process,
            multimem: properties.multimem,
        })
    }

    /// As lines of comment.
    pub fn print(&self) {
        let form = if self.one_process { "threads of one process" } else { "one process each" };
        println!(
            "# {} x {}, {form}, on {} host(s), {} within load and store, multimem {}",
            self.ranks,
            self.gpu,
            self.hosts,
            self.lsa_ranks,
            if self.multimem { "yes" } else { "no" },
        );
        println!("# NCCL {}", self.nccl);
        if !self.gpu_state.is_empty() {
            println!("# {STATE}: {}", self.gpu_state);
        }
    }
}

/// The state of a GPU. nvidia-smi counts all GPUs, so it is asked for the first of those that are visible by name.
fn gpu_state(device: usize) -> Option<String> {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok().filter(|text| !text.is_empty());
    let id = match &visible {
        Some(list) => list.split(',').nth(device)?.trim().to_owned(),
        None => device.to_string(),
    };
    let mut smi = Command::new("nvidia-smi");
    smi.args(["--id", &id, "--format=csv,noheader", "--query-gpu", STATE]);
    let output = smi.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
