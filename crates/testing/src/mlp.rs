//! The reference of an MLP that ranks share, computed in f64 from the kernels' inputs.

use devcomm::Rank;
use half::bf16;

use crate::gemm::{Factor, Problem};
use crate::rmsnorm::{count_wrong, differs};

/// A rank's weights. Matrices are row-major.
#[derive(Clone, Debug)]
pub struct Weights {
    /// `columns x hidden` elements.
    pub up: Vec<bf16>,
    /// `hidden x columns` elements.
    pub down: Vec<bf16>,
    /// The weights of RMSNorm, `hidden` elements, the same in all ranks.
    pub norm: Vec<bf16>,
}

/// Inputs and results of the MLP `h = silu(x * up^T)`, `residual += sum over the ranks of
/// h * down^T`, `y = rmsnorm(residual) * norm`. Matrices have a row for each token.
#[derive(Clone, Copy, Debug)]
pub struct Results<'a> {
    /// Rows of `hidden` elements, the same in all ranks.
    pub x: &'a [bf16],
    /// The residual before the MLP: rows of `hidden` elements, the same in all ranks.
    pub residual: &'a [bf16],
    /// The rank's columns of `h`, as computed.
    pub h: &'a [bf16],
    /// `y` and the new residual, as computed.
    pub got: [&'a [bf16]; 2],
}

/// Returns random rows of `x` and of the residual.
pub fn inputs(tokens: usize, hidden: usize) -> [Vec<bf16>; 2] {
    [4, 5].map(|seed| noise(seed, 0, [tokens, hidden], 1.0))
}

/// Returns `rows x columns` random numbers from `-scale` to `scale`. Their mantissas are random if
/// `scale` is a power of two. Each matrix of this module has a `seed` of its own.
fn noise(seed: u64, rank: usize, [rows, columns]: [usize; 2], scale: f32) -> Vec<bf16> {
    let numbers = Problem { m: rows, n: 1, k: columns, seed }.noise::<bf16>(Factor::A, rank);
    numbers.into_iter().map(|x| bf16::from_f32(x.to_f32() * scale)).collect()
}

impl Weights {
    /// Returns random weights with which `h` and `y` are of the order of 1.
    pub fn new(rank: usize, hidden: usize, columns: usize) -> Self {
        let scale = |terms: usize| (-(terms as f32).log2() / 2.0).floor().exp2();
        Self {
            up: noise(1, rank, [columns, hidden], scale(hidden)),
            down: noise(2, rank, [hidden, columns], scale(columns)),
            norm: noise(3, 0, [1, hidden], 1.0),
        }
    }

    /// Returns the number of wrong elements of some tokens, spread from the first to the last. An
    /// element of this rank's part of `h`, of `y` or of the residual is wrong if its error exceeds
    /// that of rounding. *Collective*, with the same tokens.
    ///
    /// `h` is compared with its reference; the references of `y` and the residual are computed from
    /// the ranks' `h`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Rank::all_gather`].
    pub fn count_wrong(
        &self,
        rank: &Rank,
        results: Results<'_>,
        samples: usize,
        eps: f32,
    ) -> devcomm::Result<usize> {
        let hidden = self.norm.len();
        let (tokens, columns) = (results.x.len() / hidden, self.up.len() / hidden);
        let mut wrong = 0;
        for i in 0..samples {
            let token = i * (tokens - 1) / (samples - 1).max(1);
            let [x, residual, y, sum] =
                [results.x, results.residual, results.got[0], results.got[1]]
                    .map(|rows| &rows[token * hidden..][..hidden]);
            let h = &results.h[token * columns..][..columns];
            wrong += self.count_wrong_in(rank, Results { x, residual, h, got: [y, sum] }, eps)?;
        }
        Ok(wrong)
    }

    /// Does the same as [`count_wrong`](Self::count_wrong), for results of a single token.
    fn count_wrong_in(
        &self,
        rank: &Rank,
        Results { x, residual, h, got }: Results<'_>,
        eps: f32,
    ) -> devcomm::Result<usize> {
        let is_wrong = |(row, h): (&[bf16], &bf16)| {
            let (sum, error) = dot(row, x);
            // The derivative of SiLU is at most 1.1; the GPU's sigmoid has an error of 2^-21.
            let error = 1.1 * error + sum.abs() / f64::from(1 << 21);
            differs(*h, sum / (1.0 + (-sum).exp()), error)
        };
        let wrong = self.up.chunks(x.len()).zip(h).filter(|at| is_wrong(*at)).count();

        let partial = |row| <[f64; 2]>::from(dot(row, h));
        let mine: Vec<f64> = self.down.chunks(h.len()).flat_map(partial).collect();
        let partials = rank.all_gather(&mine)?;
        let sum = |i: usize| {
            let (mut sum, mut error, mut magnitude) = (residual[i].to_f64(), 0.0, 0.0);
            for of_rank in &partials {
                sum += of_rank[2 * i];
                error += of_rank[2 * i + 1];
                magnitude += of_rank[2 * i].abs();
            }
            // At most, every rank's part and each sum of parts is rounded to bf16; the factor 1.01
            // is for sums that are greater as they are rounded.
            let rounding = f64::from(bf16::EPSILON) / 2.0 * partials.len() as f64;
            let single = f64::from(f32::EPSILON) * (sum.abs() + magnitude);
            (sum, error + 1.01 * rounding * magnitude + single)
        };
        let sums: Vec<(f64, f64)> = (0..residual.len()).map(sum).collect();
        Ok(wrong + count_wrong(&sums, &self.norm, eps, (got[0], 1.0), got[1]))
    }
}

/// Returns a sum of products, and the error that it may have in f32. Partial sums of random terms
/// stay below four times the root of the sum of squares; each of them is rounded.
fn dot(a: &[bf16], b: &[bf16]) -> (f64, f64) {
    // `f32` holds a product exactly.
    let terms = a.iter().zip(b).map(|(a, b)| f64::from(a.to_f32() * b.to_f32()));
    let (sum, squares) = terms.fold((0.0, 0.0), |(sum, all), x| (sum + x, all + x * x));
    let roundings = a.len() as f64 * f64::from(f32::EPSILON) / 2.0;
    (sum, 4.0 * f64::sqrt(squares) * roundings)
}

#[cfg(test)]
mod tests {
    use devcomm::World;

    use super::*;

    #[test]
    fn results_without_the_part_of_a_rank_and_a_wrong_activation_are_counted() {
        let (hidden, columns, eps) = (64, 32, 1e-5f32);
        let [x, residual] = inputs(1, hidden);
        let weights = [0, 1].map(|rank| Weights::new(rank, hidden, columns));
        let silu = |x: f64| bf16::from_f64(x / (1.0 + (-x).exp()));
        let h = weights.each_ref().map(|weights| -> Vec<bf16> {
            weights.up.chunks(hidden).map(|row| silu(dot(row, &x).0)).collect()
        });
        // `y` and the residual as sums of the first `ranks` parts.
        let results = |ranks: usize| -> [Vec<bf16>; 2] {
            let part = |i: usize, rank: usize| {
                dot(&weights[rank].down[i * columns..][..columns], &h[rank])
            };
            let sum = |i: usize| {
                residual[i].to_f64() + (0..ranks).map(|rank| part(i, rank).0).sum::<f64>()
            };
            let sums: Vec<f64> = (0..hidden).map(sum).collect();
            let mean = sums.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
            let scale = 1.0 / (mean + f64::from(eps)).sqrt();
            let norms = weights[0].norm.iter().map(|norm| norm.to_f64() * scale);
            let y = sums.iter().zip(norms).map(|(x, norm)| bf16::from_f64(x * norm)).collect();
            [y, sums.into_iter().map(bf16::from_f64).collect()]
        };
        let (right, wrong) = (results(2), results(1));
        let check = |rank: &Rank| {
            let own = &h[rank.rank()];
            let count = |[y, sum]: &[Vec<bf16>; 2], h: &[bf16]| {
                let results = Results { x: &x, residual: &residual, h, got: [y, sum] };
                weights[rank.rank()].count_wrong(rank, results, 1, eps)
            };
            assert_eq!(count(&right, own)?, 0);
            assert!(count(&wrong, own)? > hidden);
            let mut other = own.clone();
            other[7] = bf16::from_f32(other[7].to_f32() + 0.1);
            assert!(count(&right, &other)? > 0);
            Ok::<_, devcomm::Error>(())
        };
        World::simulated(2).unwrap().run(check).unwrap();
    }
}
