//! The command line.

use anyhow::bail;
use clap::{Parser, ValueEnum};

/// All-reduce by load and store over NVLink, beside ncclAllReduce.
#[derive(Parser)]
pub struct Options {
    /// GPUs to use, one process each [default: every visible one]
    #[arg(long, value_name = "N")]
    pub gpus: Option<usize>,

    /// Simulate N GPUs on the CPU instead
    #[arg(long, value_name = "N", conflicts_with = "gpus")]
    pub sim: Option<usize>,

    /// Run the ranks as threads of this process instead of one process each
    #[arg(long, conflicts_with = "sim")]
    pub one_process: bool,

    /// Smallest message in bytes (suffixes K, M, G)
    #[arg(long, value_name = "BYTES", default_value = "4", value_parser = parse_bytes)]
    pub min: usize,

    /// Largest message in bytes (suffixes K, M, G) [default: 256M, 256K when simulated]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub max: Option<usize>,

    /// Element type
    #[arg(long, value_enum, default_value = "all")]
    pub dtype: Dtype,

    /// Blocks of the kernel [default: chosen by size]
    #[arg(long)]
    pub blocks: Option<u32>,

    /// Threads of a block
    #[arg(long, default_value_t = 128)]
    pub threads: u32,

    /// Seed of the random inputs
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Element types to run.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
    All,
}

/// Each type with its name and size in bytes.
const TYPES: [(Dtype, &str, usize); 3] =
    [(Dtype::F32, "f32", 4), (Dtype::F16, "f16", 2), (Dtype::Bf16, "bf16", 2)];

impl Options {
    /// Refuses what cannot run.
    pub fn validate(&self) -> anyhow::Result<()> {
        if self.gpus == Some(0) || self.sim == Some(0) {
            bail!("an all-reduce needs at least one rank");
        }
        if self.threads == 0 || self.threads > 1024 {
            bail!("a block has 1 to 1024 threads, not {}", self.threads);
        }
        if self.blocks == Some(0) {
            bail!("a grid has at least one block");
        }
        if let Some(max) = self.max
            && max < self.min
        {
            bail!("--max {max} is below --min {}", self.min);
        }
        for (dtype, name, size) in TYPES {
            // Without --max the sizes go far enough.
            let largest = self.max.and_then(|max| self.sizes(max).into_iter().max());
            if self.wants(dtype) && largest.is_some_and(|largest| largest < size) {
                bail!(
                    "no message would hold an element of {name}, which has {size} bytes: raise --max"
                );
            }
        }
        Ok(())
    }

    /// Whether this type, not `All`, is to be run.
    pub fn wants(&self, dtype: Dtype) -> bool {
        self.dtype == dtype || self.dtype == Dtype::All
    }

    /// Message sizes in bytes, each four times the one before.
    pub fn sizes(&self, default_max: usize) -> Vec<usize> {
        let max = self.max.unwrap_or(default_max.max(self.min));
        std::iter::successors(Some(self.min.max(1)), |size| size.checked_mul(4))
            .take_while(|&size| size <= max)
            .collect()
    }
}

/// Element counts that divide neither by ranks nor by vectors.
pub const ODD_COUNTS: [usize; 12] = [1, 2, 3, 5, 7, 9, 15, 17, 1023, 1025, 4099, 65537];

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
