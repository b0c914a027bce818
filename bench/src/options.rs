//! Flags that the benchmarks share, under nccl-tests' names.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};

/// Who takes part.
#[derive(Args, Clone, Debug)]
pub struct RankOptions {
    /// GPUs to use, one process each [default: every visible one]
    #[arg(short = 'g', long = "ngpus", value_name = "N")]
    pub gpus: Option<usize>,

    /// Run the ranks as threads of this process instead of one process each
    #[arg(long)]
    pub one_process: bool,

    /// Give up when the GPU has not finished a batch after so many seconds
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 30)]
    pub timeout: u64,
}

impl RankOptions {
    /// The time that a batch may take.
    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

/// What is run, and how often.
#[derive(Args, Clone, Debug)]
pub struct RunOptions {
    /// Smallest message in bytes (suffixes K, M, G)
    #[arg(short = 'b', long = "minbytes", value_name = "BYTES", default_value = "8K", value_parser = parse_bytes)]
    pub min: usize,

    /// Largest message in bytes (suffixes K, M, G)
    #[arg(short = 'e', long = "maxbytes", value_name = "BYTES", default_value = "64M", value_parser = parse_bytes)]
    pub max: usize,

    /// Each message is so many times the one before
    #[arg(short = 'f', long = "stepfactor", value_name = "FACTOR", default_value_t = 8)]
    pub factor: usize,

    /// Launches in a batch
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 20)]
    pub iters: usize,

    /// Launches before the first batch that is timed
    #[arg(short = 'w', long = "warmup_iters", value_name = "N", default_value_t = 5)]
    pub warmup: usize,

    /// Check results (0 leaves it out)
    #[arg(short = 'c', long = "check", value_name = "0|1", default_value_t = 1)]
    pub check: u32,

    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value = "all")]
    pub dtype: Dtype,

    /// Launch each batch as one CUDA graph
    #[arg(short = 'G', long = "cudagraph")]
    pub graph: bool,

    /// Blocks of a kernel [default: chosen by size]
    #[arg(long)]
    pub blocks: Option<u32>,

    /// Threads of a block [default: the kernel's]
    #[arg(long)]
    pub threads: Option<u32>,

    /// Seed of the random inputs and of the order of measurements
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Where the rows go, beside the table.
#[derive(Args, Clone, Debug)]
pub struct OutputOptions {
    /// Also write the rows as CSV
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,

    /// Also write header and rows as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Element types to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    All,
}

impl RunOptions {
    /// Refuses what cannot run.
    pub fn validate(&self) -> Result<()> {
        ensure!(self.min <= self.max, "-b {} is above -e {}", self.min, self.max);
        ensure!(self.factor >= 2, "-f {} does not step: it is at least 2", self.factor);
        ensure!(self.iters > 0, "-n 0 leaves nothing to time");
        ensure!(self.blocks != Some(0), "a grid has at least one block");
        if let Some(threads) = self.threads {
            ensure!((1..=1024).contains(&threads), "a block has 1 to 1024 threads, not {threads}");
        }
        Ok(())
    }

    /// Whether this type, not `All`, is to be run.
    pub fn wants(&self, dtype: Dtype) -> bool {
        self.dtype == dtype || self.dtype == Dtype::All
    }

    /// Message sizes in bytes.
    pub fn sizes(&self) -> impl Iterator<Item = usize> {
        let (max, factor) = (self.max, self.factor);
        std::iter::successors(Some(self.min.max(4)), move |size| size.checked_mul(factor))
            .take_while(move |&size| size <= max)
    }
}

fn parse_bytes(text: &str) -> Result<usize, String> {
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

#[cfg(test)]
mod tests {
    use super::parse_bytes;

    #[test]
    fn sizes_are_read_with_their_suffixes() {
        assert_eq!(parse_bytes("8K"), Ok(8 << 10));
        assert_eq!(parse_bytes("1g"), Ok(1 << 30));
        assert_eq!(parse_bytes("12"), Ok(12));
        for bad in ["", "K", "8KB", "-1", "99999999999999G"] {
            parse_bytes(bad).unwrap_err();
        }
    }
}
