//! The header: the system under test, printed before the table, and part of the JSON.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::time::SystemTime;

use anyhow::Result;
use devcomm::{Properties, Rank, World, visible_gpus};
use serde::{Deserialize, Serialize};

use crate::base::options::without_flags;
use crate::base::{date, links};

/// System and software, as seen by rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Header {
    /// The day in UTC; `None` in files of earlier versions.
    pub date: Option<String>,
    /// The command line.
    pub command: Vec<String>,
    /// The number of ranks.
    pub ranks: usize,
    /// Size of the LSA team.
    pub lsa_ranks: usize,
    /// The GPUs; `None` for simulated ones.
    pub machine: Option<SystemInfo>,
}

/// The GPUs and their interconnect.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SystemInfo {
    /// The GPU's name.
    pub gpu: String,
    /// Driver, clocks and power limit; `None` without nvidia-smi.
    pub state: Option<GpuState>,
    /// The links between the GPUs, as in `nvidia-smi topo -m`; `None` without it, and for one GPU.
    pub links: Option<String>,
    /// The number of hosts.
    pub hosts: usize,
    /// Whether the ranks are threads of one process.
    pub threads: bool,
    /// The NCCL in use, with the CUDA that it was built for.
    pub nccl: String,
    /// NCCL's environment variables, and the one that ignores kept plans; of a path only the last
    /// part.
    #[serde(default)]
    pub environment: Vec<String>,
    /// Whether NCCL uses multicast over NVLink (NVLS), or why not.
    pub nvls: String,
    /// GIN back ends, `none` without any.
    pub gin: String,
    /// The RMA plugin named in the environment, for GIN PROXY.
    pub rma_plugin: Option<String>,
    /// Whether host one-sided operations work.
    pub host_rma: bool,
}

/// A GPU's state from nvidia-smi, with units, in the order of [`GpuState::of`]'s query.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuState {
    pub driver: String,
    pub sm_clock: String,
    pub max_sm_clock: String,
    pub memory_clock: String,
    pub power_limit: String,
}

impl Header {
    /// Collects the header from the rank and its GPU and, on the root rank, whose header alone is
    /// used, from nvidia-smi.
    pub fn of(rank: &Rank) -> Result<Self> {
        let properties = rank.communicator()?.properties()?;
        Ok(Self {
            date: Some(date(SystemTime::now())),
            command: command(),
            ranks: rank.n_ranks(),
            lsa_ranks: properties.lsa_size(),
            machine: if rank.is_simulated() {
                None
            } else {
                Some(SystemInfo::of(rank, &properties)?)
            },
        })
    }

    /// Returns the subcommand; empty without one.
    pub fn subcommand(&self) -> &str {
        self.command.get(1).map_or("", String::as_str)
    }

    /// Returns a flag of the command line with its values; empty without it.
    pub fn setting(&self, flag: &str) -> String {
        let mut words = self.command.iter().map(String::as_str);
        let first = words.find(|word| word.split('=').next() == Some(flag));
        let values = words.take_while(|word| !word.starts_with('-'));
        first.into_iter().chain(values).collect::<Vec<_>>().join(" ").replace('=', " ")
    }

    /// Returns the value of a flag on the command line, as `--iters 20`, `--iters=20`, `-n 20` or
    /// `-n20`.
    pub fn value<'a>(&'a self, names: [&str; 2]) -> Option<&'a str> {
        let after = |(at, word): (usize, &'a String)| {
            let rest = names.iter().find_map(|name| word.strip_prefix(name))?;
            match rest.strip_prefix('=') {
                Some(value) => Some(value),
                None if rest.is_empty() => self.command.get(at + 1).map(String::as_str),
                None => (!word.starts_with("--")).then_some(rest),
            }
        };
        self.command.iter().enumerate().find_map(after)
    }

    /// Returns whether launches were captured as graphs.
    pub fn in_graphs(&self) -> bool {
        self.value(["-G", "--cudagraph"]).is_some_and(|graphs| graphs != "0")
    }

    /// Returns the flags of the command line, without those in `without`, which spaces separate,
    /// and without those that name files.
    pub fn flags(&self, without: &str) -> String {
        const FILES: &str = "--json --csv --plot --compare --twins --table";
        let words = self.command.iter().skip(2).map(String::as_str);
        without_flags(without_flags(words, FILES), without).join(" ")
    }

    /// Returns the number of GPUs and their name.
    pub fn machine_name(&self) -> String {
        let ranks = self.ranks;
        match &self.machine {
            Some(machine) => format!("{ranks} x {}", machine.gpu.trim_start_matches("NVIDIA ")),
            None => format!("{ranks} simulated GPUs"),
        }
    }

    /// Returns the specified bandwidth of the links between the GPUs, in GB/s; `None` where it is
    /// not known.
    pub fn link_bandwidth(&self) -> Option<f64> {
        let machine = self.machine.as_ref()?;
        links::bandwidth(&machine.gpu, machine.links.as_deref()?)
    }
}

impl SystemInfo {
    fn of(rank: &Rank, properties: &Properties) -> Result<Self> {
        let hosts: HashSet<&String> = rank.hosts().iter().collect();
        let versions = rank.library().versions();
        let here = rank.hosts().get(rank.rank());
        let on_this_host = rank.hosts().iter().filter(|host| Some(*host) == here).count();
        let ordinals = ordinals(if rank.is_root() { on_this_host } else { 0 });
        Ok(Self {
            gpu: rank.context().device_name()?,
            state: ordinals.get(rank.device()).and_then(|ordinal| GpuState::of(ordinal)),
            links: links::between(&ordinals),
            hosts: hosts.len(),
            threads: !World::is_launched(),
            nccl: versions.build.unwrap_or_else(|| versions.version.to_string()),
            environment: environment(std::env::vars_os()),
            nvls: nvls(properties.multimem),
            gin: properties.gin_types.to_string(),
            rma_plugin: rma_plugin(),
            host_rma: properties.host_rma,
        })
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# {}", self.command.join(" "))?;
        let Some(machine) = &self.machine else {
            return writeln!(
                f,
                "# {} simulated GPUs: results are checked, nothing is timed",
                self.ranks
            );
        };
        let form = if machine.threads { "threads of one process" } else { "one process each" };
        writeln!(f, "# {} x {}, {form}, on {} host(s)", self.ranks, machine.gpu, machine.hosts)?;
        writeln!(
            f,
            "# topology: LSA team of {}, links {}; GIN {}{}, host one-sided operations {}",
            self.lsa_ranks,
            machine.links.as_deref().unwrap_or("not known"),
            machine.gin,
            machine.rma_plugin.iter().map(|name| format!(" by {name}")).collect::<String>(),
            if machine.host_rma { "yes" } else { "no" },
        )?;
        let variables = machine.environment.iter().map(|variable| format!(", {variable}"));
        let variables = variables.collect::<String>();
        writeln!(f, "# NCCL {}, NVLS {}{variables}", machine.nccl, machine.nvls)?;
        match &machine.state {
            Some(state) => writeln!(
                f,
                "# driver {}, SM clock {} before the run (at most {}), memory clock {}, power \
                 limit {}",
                state.driver,
                state.sm_clock,
                state.max_sm_clock,
                state.memory_clock,
                state.power_limit
            ),
            None => writeln!(f, "# driver and clocks are unknown: nvidia-smi does not report them"),
        }
    }
}

impl GpuState {
    fn of(ordinal: &str) -> Option<Self> {
        const STATE: &str = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit";
        let args = ["--id", ordinal, "--format=csv,noheader", "--query-gpu", STATE];
        let output = Command::new("nvidia-smi").args(args).output().ok()?;
        output.status.success().then(|| Self::parse(&String::from_utf8_lossy(&output.stdout)))?
    }

    fn parse(line: &str) -> Option<Self> {
        let mut csv = csv::ReaderBuilder::new();
        let csv = csv.has_headers(false).trim(csv::Trim::All).from_reader(line.as_bytes());
        csv.into_deserialize().next()?.ok()
    }
}

/// Returns the GPUs of this host's ranks, which may share them, by nvidia-smi's indices or by the
/// UUIDs of `CUDA_VISIBLE_DEVICES`, a variable that nvidia-smi itself ignores.
fn ordinals(ranks: usize) -> Vec<String> {
    let ranks = visible_gpus().map_or(ranks, |visible| ranks.min(visible));
    match std::env::var("CUDA_VISIBLE_DEVICES").ok().filter(|list| !list.is_empty()) {
        Some(list) => list.split(',').take(ranks).map(|id| id.trim().to_owned()).collect(),
        None => (0..ranks).map(|ordinal| ordinal.to_string()).collect(),
    }
}

fn nvls(multimem: bool) -> String {
    let off = std::env::var("NCCL_NVLS_ENABLE").is_ok_and(|value| value.trim() == "0");
    match (off, multimem) {
        (true, _) => "off (NCCL_NVLS_ENABLE=0)".to_owned(),
        (false, true) => "on".to_owned(),
        (false, false) => "off (not supported here)".to_owned(),
    }
}

fn environment(variables: impl Iterator<Item = (OsString, OsString)>) -> Vec<String> {
    let text = |(name, value): (OsString, OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    let is_told = |name: &str| name.starts_with("NCCL_") || name == "DEVCOMM_KEPT_PLANS";
    let told = variables.filter_map(text).filter(|(name, _)| is_told(name));
    let short = |value: String| value.rsplit('/').next().unwrap_or_default().to_owned();
    let mut found: Vec<_> = told.map(|(name, value)| format!("{name}={}", short(value))).collect();
    found.sort();
    found
}

/// Returns the file name of the RMA plugin.
fn rma_plugin() -> Option<String> {
    let path = std::env::var_os("NCCL_RMA_PLUGIN").filter(|path| !path.is_empty())?;
    Some(Path::new(&path).file_name()?.to_string_lossy().into_owned())
}

fn command() -> Vec<String> {
    let mut words: Vec<String> = std::env::args().collect();
    if let Some(program) = words.first_mut() {
        // The path says nothing about the measurement.
        *program = env!("CARGO_BIN_NAME").to_owned();
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_gpu_is_read_from_nvidia_smis_csv() {
        let state = GpuState::parse("580.159.04, 345 MHz, 1980 MHz, 3201 MHz, 700.00 W\n").unwrap();
        assert_eq!(
            (state.driver.as_str(), state.max_sm_clock.as_str()),
            ("580.159.04", "1980 MHz")
        );
        assert_eq!(state.power_limit, "700.00 W");
        assert_eq!(GpuState::parse("No devices were found"), None);
    }

    #[test]
    fn flags_are_read_as_the_command_line_has_them() {
        let words = "devcomm-bench put -n20 -G 1 --json a.json --rounds=7 -b 1K --csv=b.csv --host";
        let command = words.split(' ').map(str::to_owned).collect();
        let header = Header { date: None, command, ranks: 2, lsa_ranks: 2, machine: None };
        let value = |names| header.value(names);
        assert_eq!(value(["-n", "--iters"]), Some("20"));
        assert_eq!(value(["-b", "--minbytes"]), Some("1K"));
        assert_eq!(value(["--rounds"; 2]), Some("7"));
        assert_eq!(value(["-w", "--warmup_iters"]), None);
        assert!(header.in_graphs());
        assert_eq!(
            ["--host", "--rounds", "-c"].map(|flag| header.setting(flag)),
            ["--host", "--rounds 7", ""]
        );
        assert_eq!(header.flags("-G --rounds"), "-n20 -b 1K --host");
        assert_eq!(header.flags("-n --rounds"), "-G 1 -b 1K --host");
    }

    #[test]
    fn the_head_names_gpu_driver_clocks_nccl_nvls_and_topology() {
        let state = GpuState::parse("580.159.04, 1980 MHz, 1980 MHz, 3201 MHz, 700.00 W");
        let machine = SystemInfo {
            gpu: "NVIDIA H200".to_owned(),
            state,
            links: Some("NV18".to_owned()),
            hosts: 1,
            threads: true,
            nccl: "2.32.3+cuda13.4".to_owned(),
            environment: environment(
                [
                    ("NCCL_RMA_PLUGIN", "/lib/librma.so"),
                    ("HOME", "/"),
                    ("NCCL_ALGO", "Ring"),
                    ("DEVCOMM_KEPT_PLANS", "0"),
                ]
                .map(|(name, value)| (name.into(), value.into()))
                .into_iter(),
            ),
            nvls: nvls(false),
            gin: "PROXY".to_owned(),
            rma_plugin: Some("librma.so".to_owned()),
            host_rma: true,
        };
        let command = vec!["devcomm-bench".to_owned(), "all-reduce".to_owned()];
        let mut header =
            Header { date: None, command, ranks: 4, lsa_ranks: 4, machine: Some(machine) };
        let text = header.to_string();
        assert_eq!(text.lines().count(), 5);
        assert!(text.lines().all(|line| line.starts_with("# ")), "{text}");
        for part in [
            "devcomm-bench all-reduce",
            "4 x NVIDIA H200, threads of one process",
            "LSA team of 4, links NV18; GIN PROXY by librma.so, host one-sided operations yes",
            "NCCL 2.32.3+cuda13.4, NVLS off",
            ", DEVCOMM_KEPT_PLANS=0, NCCL_ALGO=Ring, NCCL_RMA_PLUGIN=librma.so",
            "driver 580.159.04, SM clock 1980 MHz before the run (at most 1980 MHz)",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let json = serde_json::to_value(&header).unwrap();
        assert_eq!(json["machine"]["state"]["driver"], "580.159.04");
        assert_eq!(json["machine"]["links"], "NV18");
        header.machine = None;
        assert!(header.to_string().contains("# 4 simulated GPUs"), "{header}");
    }
}
