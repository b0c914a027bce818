//! Shapes of matrix products, from the command line: lists of dimensions, or a named set.

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use devcomm_testing::gemm::{MOST_TERMS, Problem};

/// The shapes of a run.
#[derive(Args, Clone, Debug)]
pub struct ShapeOptions {
    /// Rows of A and C, comma-separated; every combination of --m, --n and --k runs. Each benchmark
    /// has defaults of its own, smaller ones when simulated
    #[arg(long, value_delimiter = ',', value_name = "ROWS")]
    m: Vec<usize>,

    /// Rows of B, which are columns of C
    #[arg(long, value_delimiter = ',', value_name = "COLUMNS")]
    n: Vec<usize>,

    /// Columns of A and B (the terms of the sums), for 8-bit floats multiples of 16
    #[arg(long, value_delimiter = ',', value_name = "TERMS")]
    k: Vec<usize>,

    /// The shapes of a set, instead of the lists
    #[arg(long, value_enum, conflicts_with_all = ["m", "n", "k"])]
    set: Option<Set>,

    /// The number of random shapes that --seed chooses, instead of the lists: 1 to 8192 rows, 256
    /// to 16384 columns, 256 to 16384 terms
    #[arg(long, value_name = "N", conflicts_with_all = ["m", "n", "k", "set"])]
    random: Option<usize>,

    /// The fewest rows of random shapes
    #[arg(long, value_name = "ROWS", requires = "random", default_value_t = 1)]
    #[arg(value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..8192))]
    least_rows: usize,
}

/// Returns random shapes: the logarithms of the dimensions are uniform; n and k are multiples of 8.
fn random(count: usize, seed: u64, least_rows: usize) -> Vec<[usize; 3]> {
    let mut source = fastrand::Rng::with_seed(seed);
    let mut between = |least: f64, most: f64| least * (most / least).powf(source.f64());
    let mut shape = || {
        let [n, k] = [0, 1].map(|_| between(32.0, 2048.0) as usize * 8);
        [between(least_rows as f64, 8192.0) as usize, n, k]
    };
    (0..count).map(|_| shape()).collect()
}

/// A named set of shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Set {
    /// Large matrices: 4096^3, 8192^3, 16384x4096x4096
    Square,
    /// Few rows, as when a language model generates: 1 to 256 with layers of usual models
    Decode,
    /// The four linear layers of Llama 3 70B on two ranks, 1 to 4096 rows; benchmarks of products
    /// with a collective take the two that have it in the model
    #[value(name = "llama70b-tp2")]
    Llama70bTp2,
    /// Few terms: k of 1024 and 2048
    ShortK,
    /// Rows and columns that are no multiples of a tile, some of them odd; k is a multiple of 8,
    /// and of 8-bit floats padded to one of 16
    Odd,
}

impl Set {
    /// Returns the shapes `[m, n, k]`.
    pub fn shapes(self) -> Vec<[usize; 3]> {
        let layers = |rows: &[usize], layers: &[[usize; 2]]| {
            layers.iter().flat_map(|&[n, k]| rows.iter().map(move |&m| [m, n, k])).collect()
        };
        match self {
            Self::Square => vec![[4096; 3], [8192; 3], [16384, 4096, 4096]],
            Self::Decode => layers(
                &[1, 8, 16, 32, 64, 128, 256],
                &[[4096, 4096], [8192, 4096], [8192, 1024], [28672, 8192], [8192, 14336]],
            ),
            // Hidden size 8192, 64 heads and 8 key-value heads of 128, feed-forward size 28672:
            // QKV, output, gate and up, down.
            Self::Llama70bTp2 => layers(
                &[1, 16, 128, 512, 2048, 4096],
                &[[5120, 8192], [8192, 4096], [28672, 8192], [8192, 14336]],
            ),
            Self::ShortK => vec![[8192, 8192, 1024], [8192, 8192, 2048], [4096, 4096, 1024]],
            Self::Odd => {
                vec![[1000; 3], [7, 8192, 4104], [513, 8192, 3584], [4097, 4095, 4088]]
            }
        }
    }
}

impl ShapeOptions {
    pub fn are_random(&self) -> bool {
        self.random.is_some()
    }

    /// Returns whether a product has the collective in its model: an all-gather of the rows before
    /// it (`gathers`) if its terms are the hidden size, or a reduction of its result if its columns
    /// are. Products that are of no model have both.
    pub fn has_collective(&self, Problem { n, k, .. }: &Problem, gathers: bool) -> bool {
        /// The hidden size of Llama 3 70B.
        const HIDDEN: usize = 8192;
        let hidden = if gathers { *k } else { *n };
        self.set != Some(Set::Llama70bTp2) || hidden == HIDDEN
    }

    /// Returns the problems of `ranks` ranks, with defaults for empty lists of `m`, `n` and `k`.
    /// Rows of A and B with elements of one byte are multiples of 16 bytes, to which `k` of sets
    /// and defaults is padded.
    pub fn problems(
        &self,
        default: [&[usize]; 3],
        element_bytes: usize,
        ranks: usize,
        seed: u64,
    ) -> Result<Vec<Problem>> {
        let unit = if element_bytes == 1 { 16 } else { 1 };
        let [rows, columns, terms] = lists_or([self.m.as_slice(), &self.n, &self.k], default);
        let combinations = || {
            let with = |&k| columns.iter().flat_map(move |&n| rows.iter().map(move |&m| [m, n, k]));
            terms.iter().flat_map(with).collect()
        };
        let shapes: Vec<[usize; 3]> = match self.random {
            Some(count) => random(count, seed, self.least_rows),
            None => self.set.map_or_else(combinations, Set::shapes),
        };
        let problem = |[m, n, k]: [usize; 3]| {
            let k = if self.k.is_empty() { k.next_multiple_of(unit) } else { k };
            ensure!(m > 0 && n > 0 && k > 0, "{m} x {n} with {k} terms is empty");
            ensure!(
                k.checked_mul(ranks).is_some_and(|terms| terms <= MOST_TERMS),
                "--k {k}: sums of more than {MOST_TERMS} terms over all ranks would not be exact"
            );
            ensure!(
                k.is_multiple_of(unit),
                "--k {k}: rows of 8-bit floats need a multiple of 16 elements"
            );
            Ok(Problem { m, n, k, seed })
        };
        shapes.into_iter().map(problem).collect()
    }
}

/// Returns lists from the command line, such as of `m`, `n` and `k`, with defaults for empty ones.
pub fn lists_or<'a, const N: usize>(
    given: [&'a [usize]; N],
    default: [&'a [usize]; N],
) -> [&'a [usize]; N] {
    std::array::from_fn(|i| if given[i].is_empty() { default[i] } else { given[i] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        shapes: ShapeOptions,
    }

    fn parse(args: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(["bench"].into_iter().chain(args.split_whitespace()))
    }

    fn shapes(args: &str) -> Vec<[usize; 3]> {
        shapes_of(args, 2).unwrap()
    }

    fn shapes_of(args: &str, element_bytes: usize) -> Result<Vec<[usize; 3]>> {
        let options = parse(args)?.shapes;
        let problems = options.problems([&[1], &[8], &[24]], element_bytes, 1, 0)?;
        Ok(problems.iter().map(Problem::shape).collect())
    }

    #[test]
    fn lists_are_combined_and_have_defaults() {
        assert_eq!(shapes("--m 2,3 --k 5"), [[2, 8, 5], [3, 8, 5]]);
        assert_eq!(shapes(""), [[1, 8, 24]]);
    }

    #[test]
    fn a_set_replaces_the_lists() {
        assert_eq!(shapes("--set square")[2], [16384, 4096, 4096]);
        assert_eq!(shapes("--set decode").len(), 7 * 5);
        assert_eq!(shapes("--set llama70b-tp2")[5], [4096, 5120, 8192]);
        let llama = parse("--set llama70b-tp2").unwrap().shapes;
        let with_collective = |gathers| {
            let mut problems = llama.problems([&[]; 3], 2, 1, 0).unwrap();
            problems.retain(|problem| problem.m == 16 && llama.has_collective(problem, gathers));
            problems.iter().map(Problem::shape).collect::<Vec<_>>()
        };
        // The results of output and down are reduced, and rows gathered before QKV, gate and up.
        assert_eq!(with_collective(false), [[16, 8192, 4096], [16, 8192, 14336]]);
        assert_eq!(with_collective(true), [[16, 5120, 8192], [16, 28672, 8192]]);
        let refused = parse("--set odd --n 8").unwrap_err().to_string();
        assert!(refused.contains("--set") && refused.contains("--n"), "{refused}");
    }

    #[test]
    fn random_shapes_depend_on_nothing_but_the_seed() {
        let some = random(200, 1, 1);
        assert!(some == random(200, 1, 1) && some != random(200, 2, 1));
        assert!(random(200, 1, 65).iter().all(|[m, ..]| (65..=8192).contains(m)));
        assert!(some.iter().all(|[m, n, k]| {
            (1..=8192).contains(m)
                && [n, k].iter().all(|x| (256..=16384).contains(*x) && *x % 8 == 0)
        }));
        assert_eq!(shapes("--random 3").len(), 3);
    }

    #[test]
    fn a_product_without_elements_or_an_exact_sum_is_refused() {
        for (args, why) in [("--m 0", "is empty"), ("--k 262145", "would not be exact")] {
            let error = shapes_of(args, 2).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn rows_of_8_bit_floats_are_padded_except_those_that_are_asked_for() {
        assert_eq!(shapes_of("--m 7", 1).unwrap(), [[7, 8, 32]]);
        assert_eq!(shapes_of("--set odd", 1).unwrap()[..2], [[1000, 1000, 1008], [7, 8192, 4112]]);
        let error = shapes_of("--k 24", 1).unwrap_err().to_string();
        assert!(error.contains("a multiple of 16 elements"), "{error}");
    }
}
