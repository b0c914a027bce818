//! Flags shared by the benchmarks, with nccl-tests' names.

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use devcomm::{CommConfig, CtaPolicy, GraphUsageMode};

/// Flags for ranks.
#[derive(Args, Clone, Debug)]
pub struct RankOptions {
    /// GPUs to use, one rank each; under torchrun, mpirun or srun the number of their ranks
    /// [default: all visible GPUs]
    #[arg(short = 'g', long = "ngpus", value_name = "N")]
    pub gpus: Option<usize>,

    /// Start each rank as a process instead of a thread of this process
    #[arg(long)]
    pub processes: bool,

    /// Use devcomm's plugin for GIN between the GPUs of this host, without an RDMA card; its times
    /// do not predict a network's
    #[arg(long)]
    pub gin_loopback: bool,

    /// Seconds after which unfinished GPU work is an error
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 30)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,
}

impl RankOptions {
    /// Returns the time limit of a wait for GPU work.
    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

/// Flags for message sizes.
#[derive(Args, Clone, Debug)]
pub struct SizeOptions {
    /// Smallest message in bytes (suffixes K, M, G)
    #[arg(short = 'b', long = "minbytes", value_name = "BYTES", default_value = "8K")]
    #[arg(value_parser = parse_bytes)]
    pub min: usize,

    /// Largest message in bytes (suffixes K, M, G) [default: 64M; put: 4M; 64K when simulated]
    #[arg(short = 'e', long = "maxbytes", value_name = "BYTES", value_parser = parse_bytes)]
    pub max: Option<usize>,

    /// Ratio of consecutive message sizes
    #[arg(short = 'f', long = "stepfactor", value_name = "FACTOR", default_value_t = 8)]
    pub factor: usize,

    /// Difference of consecutive message sizes in bytes (suffixes K, M, G), instead of -f
    #[arg(short = 'i', long = "stepbytes", value_name = "BYTES", conflicts_with = "factor")]
    #[arg(value_parser = parse_bytes)]
    pub step: Option<usize>,
}

/// Flags for kernels' grids.
#[derive(Args, Clone, Debug)]
pub struct GridOptions {
    /// Blocks of a kernel [default: chosen by size]
    #[arg(long)]
    pub blocks: Option<u32>,

    /// Threads of a block [default: the kernel's]
    #[arg(long)]
    pub threads: Option<u32>,
}

impl GridOptions {
    /// Refuses invalid values.
    pub fn validate(&self) -> Result<()> {
        ensure!(self.blocks != Some(0), "a grid has at least one block");
        if let Some(threads) = self.threads {
            ensure!((1..=1024).contains(&threads), "a block has 1 to 1024 threads, not {threads}");
        }
        Ok(())
    }

    /// Returns the blocks and threads for a rank's part of `bytes` bytes: enough blocks, up to
    /// `max_blocks`, to give each thread one vector of 16 bytes.
    pub fn grid(&self, bytes: usize, threads: u32, max_blocks: u32) -> (u32, u32) {
        let threads = self.threads.unwrap_or(threads);
        let wanted = bytes.div_ceil(16 * threads as usize).clamp(1, max_blocks as usize) as u32;
        (self.blocks.unwrap_or(wanted), threads)
    }
}

/// Rounds, if the command line names no number.
pub const ROUNDS: usize = 21;

/// Flags for iterations and rounds.
#[derive(Args, Clone, Debug)]
pub struct RunOptions {
    /// Launches that are timed together as a batch; with -G, launches in a graph
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 20)]
    pub iters: usize,

    /// Launches before the first timed batch
    #[arg(short = 'w', long = "warmup_iters", value_name = "N", default_value_t = 5)]
    pub warmup: usize,

    /// Number of full checks of each result, on random data; 0 disables checks
    #[arg(short = 'c', long = "check", value_name = "N", default_value_t = 1)]
    pub check: u32,

    /// Capture -n launches as a CUDA graph, and time a batch of N graph launches; 0 for plain
    /// launches
    #[arg(short = 'G', long = "cudagraph", value_name = "N", default_value_t = 0)]
    pub graph: usize,

    /// Time the calls on the host, which enqueue the work, and not the work on the GPU
    #[arg(long, conflicts_with = "graph")]
    pub host: bool,

    /// `Collectives` objects that may run at the same time; with 1 an operation may fill the GPU
    /// [default: 2]
    #[arg(long, value_name = "N")]
    pub concurrent: Option<u32>,

    /// Also run operations in place (one buffer to send and to receive), where they allow it
    #[arg(long)]
    pub in_place: bool,

    /// Configurations of NCCL, comma-separated, with a row for each where it may matter: `mixed` is
    /// NCCL's default, with graph mixing. All others turn graph mixing off: `unmixed` changes
    /// nothing else, `efficiency` and `zero` also set the CTA policy of that name, and `ctas:<n>`
    /// also fixes n CTAs [default: unmixed,efficiency,zero; mixed when simulated]
    #[arg(long, value_delimiter = ',', value_name = "CONFIG")]
    pub nccl: Vec<NcclSetting>,

    /// Also time every variant with an unrelated kernel before each call, which does not trigger
    /// programmatic dependent launch; the row has the time of both minus that kernel's own time
    #[arg(long, conflicts_with = "host")]
    pub between: bool,

    /// Rounds, each with one batch of every variant, in random order
    #[arg(long, value_name = "N", default_value_t = ROUNDS)]
    pub rounds: usize,

    /// Seed of the random inputs and of the order of measurements
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    #[command(flatten)]
    pub nccl_tests: NcclTestsOptions,
}

/// Declares nccl-tests' flags that have no meaning here. Each is refused with the reason, except
/// for the value that changes nothing.
macro_rules! refused {
    ($($field:ident $short:literal $long:literal $accepted:literal, $why:literal;)*) => {
        /// nccl-tests' flags that have no meaning here.
        #[derive(Args, Clone, Debug)]
        pub struct NcclTestsOptions {
            $(
                #[arg(short = $short, long = $long, hide = true)]
                $field: Option<String>,
            )*
        }

        impl NcclTestsOptions {
            /// Refuses values that would change something.
            pub fn validate(&self) -> Result<()> {
                $(
                    let value = self.$field.as_deref().filter(|value| *value != $accepted);
                    if let Some(value) = value {
                        let (short, long, why) = ($short, $long, $why);
                        bail!("nccl-tests' -{short} (--{long}) {value} has no meaning here: {why}");
                    }
                )*
                Ok(())
            }
        }
    };
}

refused! {
    nthreads 't' "nthreads" "1",
        "-g counts all ranks, each a thread, or with --processes a process";
    root 'r' "root" "0", "broadcast sends from rank 0";
    agg_iters 'm' "agg_iters" "1", "calls are timed together by -n, one after the other";
    run_cycles 'N' "run_cycles" "1",
        "--rounds repeats the measurement, and the table has the medians";
    average 'a' "average" "3", "times are those of the slowest rank";
    per_iter_timing 'I' "per_iter_timing" "0",
        "--rounds repeats the measurement, and the table has its noise";
    per_iter_skip 'K' "per_iter_skip" "0", "-w sets the launches that are not timed";
    parallel_init 'p' "parallel_init" "1", "ranks initialise NCCL in parallel";
    blocking 'z' "blocking" "0", "launches of a batch are not waited for";
    report_cputime 'C' "report_cputime" "0", "--host times the host's calls";
    local_register 'R' "local_register" "0",
        "--variants chooses the memory: nccl is -R 0, nccl-sym is -R 2";
    device_implementation 'D' "device_implementation" "0",
        "--variants chooses the implementation";
    device_cta_count 'V' "device_cta_count" "",
        "--blocks sets the blocks of a kernel, --nccl ctas:N those of NCCL";
    cta_policy 'x' "cta_policy" "0", "--nccl chooses NCCL's policies";
    stream_null 'y' "stream_null" "0", "every rank has a stream of its own";
    report_timestamps 'S' "report_timestamps" "0", "there are no timestamps";
    output_file 'J' "output_file" "", "--json writes the rows";
    memory 'M' "memory" "0", "NCCL_DEBUG=INFO tells NCCL's memory";
    unalign 'u' "unalign" "0", "buffers are aligned";
}

/// Element types to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    #[value(alias = "float")]
    F32,
    #[value(alias = "half")]
    F16,
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "f8e4m3")]
    E4m3,
    #[value(alias = "f8e5m2")]
    E5m2,
    #[value(alias = "int32")]
    I32,
    /// f32, f16 and bf16
    All,
}

impl Dtype {
    /// Returns whether it stands for floats of 16 and 32 bits.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16 | Self::All)
    }

    /// Refuses other types for `what`, which has only these.
    pub fn require_float(self, what: &str) -> Result<()> {
        ensure!(self.is_float(), "no variant runs: {what} has the types f32, f16 and bf16 (-d)");
        Ok(())
    }

    /// Returns whether the type with this name is to run.
    pub fn includes(self, name: &str) -> bool {
        let named = <Self as ValueEnum>::from_str(name, false);
        match self {
            Self::All => matches!(named, Ok(Self::F32 | Self::F16 | Self::Bf16)),
            _ => named == Ok(self),
        }
    }
}

/// A configuration of NCCL's communicators.
#[derive(Clone, Debug)]
pub struct NcclSetting {
    pub name: String,
    /// `None` for the communicator of the world.
    pub config: Option<CommConfig>,
}

impl NcclSetting {
    /// The configurations that are measured if the command line names none.
    pub const DEFAULTS: [&str; 3] = ["unmixed", "efficiency", "zero"];
}

impl FromStr for NcclSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unmixed = CommConfig::new().graph_usage_mode(GraphUsageMode::OneGraph);
        let config = match text {
            "mixed" => None,
            "unmixed" => Some(unmixed),
            "efficiency" => Some(unmixed.cta_policy(CtaPolicy::EFFICIENCY)),
            "zero" => Some(unmixed.cta_policy(CtaPolicy::ZERO)),
            _ => {
                let ctas = text.strip_prefix("ctas:").and_then(|number| number.parse().ok());
                let what = "mixed, unmixed, efficiency, zero or ctas:<blocks>";
                let ctas =
                    ctas.filter(|ctas| *ctas > 0).ok_or(format!("`{text}` is not {what}"))?;
                Some(unmixed.min_ctas(ctas).max_ctas(ctas))
            }
        };
        Ok(Self { name: text.to_owned(), config })
    }
}

/// Default largest message on GPUs.
pub const LARGEST: usize = 64 << 20;

impl SizeOptions {
    /// Refuses invalid values.
    pub fn validate(&self) -> Result<()> {
        if let Some(max) = self.max {
            ensure!(self.min <= max, "-b {} is above -e {max}", self.min);
        }
        ensure!(self.factor >= 2, "-f must be at least 2, not {}", self.factor);
        ensure!(self.step != Some(0), "-i must be at least 1, not 0");
        Ok(())
    }

    /// Returns the message sizes in bytes, up to -e or else `largest`.
    pub fn sizes(&self, largest: usize) -> impl Iterator<Item = usize> {
        let max = self.max.unwrap_or(largest.max(self.min));
        let (factor, step) = (self.factor, self.step);
        // -b 0 -i 16 is 16, 32 ..: an empty message is left out.
        let first = if self.min == 0 { step.unwrap_or(1) } else { self.min };
        std::iter::successors(Some(first), move |size| match step {
            Some(step) => size.checked_add(step),
            None => size.checked_mul(factor),
        })
        .take_while(move |&size| size <= max)
    }

    /// Returns the message sizes in elements of `bytes` bytes, rounded down as in nccl-tests,
    /// without empty messages.
    pub fn counts(&self, largest: usize, bytes: usize) -> Result<Vec<usize>> {
        let mut counts: Vec<usize> = self.sizes(largest).map(|size| size / bytes).collect();
        counts.retain(|&count| count > 0);
        counts.dedup();
        ensure!(!counts.is_empty(), "no message holds an element of {bytes} bytes: raise -e");
        Ok(counts)
    }
}

impl RunOptions {
    /// Refuses invalid values.
    pub fn validate(&self) -> Result<()> {
        ensure!(self.iters > 0, "-n 0 leaves nothing to time");
        ensure!(self.rounds > 0, "--rounds 0 leaves nothing to compare");
        self.nccl_tests.validate()
    }

    /// Refuses invalid values, and flags that are not those of plans alone.
    pub fn validate_for_plans(&self) -> Result<()> {
        let others = !self.nccl.is_empty() || self.in_place || self.between;
        ensure!(
            !others,
            "tune times plans of devcomm alone: leave out --nccl, --in-place, --between"
        );
        self.validate()
    }

    /// Describes the measurement.
    pub fn describe(&self) -> String {
        let (rounds, iters) = (self.rounds, self.iters);
        let how = match self.graph {
            0 => format!("{iters} launches"),
            graphs => format!("{graphs} launches of a graph of {iters}"),
        };
        let what = if self.host { "time of the host's calls" } else { "GPU time between events" };
        format!(
            "{rounds} rounds, each {how} of every variant, in random order; {what}, of the slowest \
             rank, median of the rounds"
        )
    }
}

/// Returns a number of bytes, perhaps with a suffix.
pub fn parse_bytes(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.char_indices().last() {
        Some((end, 'k' | 'K')) => (&text[..end], 10),
        Some((end, 'm' | 'M')) => (&text[..end], 20),
        Some((end, 'g' | 'G')) => (&text[..end], 30),
        _ => (text, 0),
    };
    let number: usize =
        digits.parse().map_err(|_| format!("`{text}` is not a size: try 4, 64K, 256M or 1G"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("`{text}` is too large"))
}

/// Returns the words of a command line without the flags in `flags`, which are separated by spaces,
/// and without their values: all words up to the next flag, so that no positional argument may
/// follow one of them.
pub fn without_flags<'a>(words: impl IntoIterator<Item = &'a str>, flags: &str) -> Vec<&'a str> {
    let mut is_kept = true;
    let keeps = |word: &&str| {
        if word.starts_with('-') {
            // A value may follow a short flag without a space: `-n20`.
            let is = |flag: &str| match flag.starts_with("--") {
                true => Some(flag) == word.split('=').next(),
                false => word.starts_with(flag),
            };
            is_kept = !flags.split_whitespace().any(is);
        }
        is_kept
    };
    words.into_iter().filter(keeps).collect()
}

/// Returns the flags of `args`, for tests.
#[cfg(test)]
pub fn parse<A: Args>(args: &str) -> A {
    #[derive(clap::Parser)]
    struct Cli<A: Args> {
        #[command(flatten)]
        args: A,
    }
    let words = ["bench"].into_iter().chain(args.split_whitespace());
    <Cli<A> as clap::Parser>::parse_from(words).args
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn sizes_are_read_with_their_suffixes() {
        assert_eq!(parse_bytes("8K"), Ok(8 << 10));
        assert_eq!(parse_bytes("1g"), Ok(1 << 30));
        assert_eq!(parse_bytes("12"), Ok(12));
        for bad in ["", "K", "8KB", "-1", "99999999999999G"] {
            parse_bytes(bad).unwrap_err();
        }
    }

    #[test]
    fn sizes_step_by_a_factor_or_by_bytes() {
        let sizes = |args| parse::<SizeOptions>(args).sizes(1 << 10).collect::<Vec<_>>();
        assert_eq!(sizes("-b 4 -e 100 -f 4"), [4, 16, 64]);
        assert_eq!(sizes("-b 4 -e 10 -i 3"), [4, 7, 10]);
        assert_eq!(sizes("-b 256 -f 2"), [256, 512, 1024]);
        // A -b above the default -e is the only size.
        assert_eq!(sizes("-b 1M"), [1 << 20]);
    }

    #[test]
    fn sizes_that_hold_no_whole_number_of_elements_are_rounded_down() {
        let sizes = parse::<SizeOptions>("-b 1 -e 11 -i 1");
        assert_eq!(sizes.counts(LARGEST, 4).unwrap(), [1, 2]);
        let error = sizes.counts(LARGEST, 16).unwrap_err().to_string();
        assert!(error.contains("16 bytes"), "{error}");
    }

    #[test]
    fn a_grid_gives_each_thread_a_vector_up_to_its_largest() {
        assert_eq!(parse::<GridOptions>("").grid(1, 128, 64), (1, 128));
        assert_eq!(parse::<GridOptions>("").grid(16 * 128 * 3 + 1, 128, 64), (4, 128));
        assert_eq!(parse::<GridOptions>("").grid(1 << 30, 128, 64), (64, 128));
        assert_eq!(parse::<GridOptions>("--blocks 7 --threads 32").grid(1 << 30, 128, 64), (7, 32));
    }

    #[test]
    fn a_run_says_how_it_measures() {
        assert!(parse::<RunOptions>("-n 7").describe().contains("each 7 launches of every"));
        assert!(parse::<RunOptions>("-n 7 -G 3").describe().contains("3 launches of a graph of 7"));
    }
}
