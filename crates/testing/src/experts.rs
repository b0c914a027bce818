//! Tokens of expert parallelism with their routing, and the results that a test expects for them.

use half::bf16;

/// How tokens choose their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// A token has any experts. They differ, unless there are fewer than `2 * top_k` experts.
    Random,
    /// The first experts are much more frequent than others.
    Skewed,
    /// All tokens have one expert, the same.
    One,
    /// No token has an expert.
    None,
    /// A token has any experts, also the same one twice, and sometimes none.
    Repeated,
}

/// Sizes, and tokens of all ranks.
pub struct Batch {
    /// Elements of a token.
    pub hidden: usize,
    /// Experts of all ranks.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// An expert's rows begin at a multiple of this.
    pub alignment: usize,
    /// The ranks of an LSA team, if there are several teams.
    pub team: Option<usize>,
    /// The number of tokens of each rank.
    pub tokens: Vec<usize>,
    /// The rows of each rank's tokens.
    pub inputs: Vec<Vec<bf16>>,
    /// The experts of each rank's tokens, -1 for none.
    pub ids: Vec<Vec<i32>>,
    /// The weights of these experts.
    pub weights: Vec<Vec<f32>>,
}

/// The order of a rank's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The index at which each expert's rows begin, and the index after the last row.
    pub offsets: Vec<u32>,
    /// The number of rows of each expert.
    pub sizes: Vec<u32>,
    /// Each row that is used: its index, the rank and the number of its token.
    pub rows: Vec<(usize, usize, usize)>,
}

impl Batch {
    /// Returns tokens with random rows, `tokens[rank]` in each rank, without experts.
    #[must_use]
    pub fn new(hidden: usize, experts: usize, top_k: usize, tokens: &[usize], seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let row = |tokens: &usize| (0..tokens * hidden).map(|_| number(&mut random)).collect();
        Self {
            hidden,
            experts,
            top_k,
            alignment: 1,
            team: None,
            inputs: tokens.iter().map(row).collect(),
            ids: tokens.iter().map(|tokens| vec![-1; tokens * top_k]).collect(),
            weights: tokens.iter().map(|tokens| vec![0.0; tokens * top_k]).collect(),
            tokens: tokens.to_vec(),
        }
    }

    /// Gives the tokens other experts and weights.
    #[must_use]
    pub fn routed(mut self, routing: Routing, seed: u64) -> Self {
        self.route(routing, seed);
        self
    }

    /// Gives the tokens other experts and weights.
    pub fn route(&mut self, routing: Routing, seed: u64) {
        let mut random = fastrand::Rng::with_seed(seed);
        let favourite = random.usize(..self.experts) as i32;
        for (ids, weights) in self.ids.iter_mut().zip(&mut self.weights) {
            for (ids, weights) in ids.chunks_mut(self.top_k).zip(weights.chunks_mut(self.top_k)) {
                weights.fill_with(|| random.f32());
                for k in 0..self.top_k {
                    ids[k] = match routing {
                        Routing::None => -1,
                        Routing::One if k == 0 => favourite,
                        Routing::One => -1,
                        // The two numbers below 0 are none.
                        Routing::Repeated => random.usize(..self.experts + 2) as i32 - 2,
                        Routing::Random | Routing::Skewed => loop {
                            // Fourth powers are mostly small.
                            let x = random.f32();
                            let x = if routing == Routing::Skewed { x * x * x * x } else { x };
                            let id = (x * self.experts as f32) as i32;
                            // Among few experts it may take long to find another one.
                            if !ids[..k].contains(&id) || self.experts < 2 * self.top_k {
                                break id;
                            }
                        },
                    };
                    ids[k] = ids[k].max(-1);
                }
            }
        }
    }

    /// Returns the batch without the tokens and the experts of some ranks.
    #[must_use]
    pub fn without(&self, ranks: &[usize]) -> Self {
        let is_left = |rank: usize| !ranks.contains(&rank);
        // The id -1, of no expert, stays -1 whether or not the rank is left for which it counts.
        let left = |id: &i32| {
            let rank = usize::try_from(*id).map_or(0, |id| id / self.local());
            if is_left(rank) { *id } else { -1 }
        };
        Self {
            inputs: self.inputs.clone(),
            ids: self.ids.iter().map(|ids| ids.iter().map(left).collect()).collect(),
            weights: self.weights.clone(),
            tokens: (0..).zip(&self.tokens).map(|(r, n)| if is_left(r) { *n } else { 0 }).collect(),
            ..*self
        }
    }

    /// Returns the number of experts of a rank.
    #[must_use]
    pub fn local(&self) -> usize {
        self.experts / self.tokens.len()
    }

    /// Returns a token's row.
    #[must_use]
    pub fn row(&self, rank: usize, token: usize) -> &[bf16] {
        &self.inputs[rank][token * self.hidden..][..self.hidden]
    }

    /// Returns a token's row as it arrives as 8-bit floats with scales: the product of each element
    /// and its scale, and one scale per 128 elements.
    #[must_use]
    pub fn rounded(&self, rank: usize, token: usize) -> (Vec<f32>, Vec<f32>) {
        let (mut row, mut scales) = (Vec::new(), Vec::new());
        for block in self.row(rank, token).chunks(128) {
            let values = block.iter().map(|x| x.to_f64());
            let largest = values.clone().fold(0.0, |most: f64, x| most.max(x.abs()));
            // The least power of two, from the least normal f32 on, by which the numbers are
            // divided to be at most 448, the greatest 8-bit float; up to 2^119 for finite numbers,
            // so that they stay finite.
            let mut powers = (-126..=119).map(|exponent| 2_f64.powi(exponent));
            let most = if largest.is_finite() { 119 } else { 120 };
            let scale = powers.find(|scale| 448.0 * scale >= largest).unwrap_or(2_f64.powi(most));
            row.extend(values.map(|x| (e4m3(x / scale) * scale) as f32));
            scales.push(scale as f32);
        }
        (row, scales)
    }

    /// Returns a token's experts with their weights, in their order, without those that do not
    /// exist.
    fn chosen(&self, rank: usize, token: usize) -> impl Iterator<Item = (usize, f32)> {
        let all = token * self.top_k..(token + 1) * self.top_k;
        let ids = self.ids[rank][all.clone()].iter().zip(&self.weights[rank][all]);
        ids.filter_map(|(id, weight)| {
            let id = usize::try_from(*id).ok().filter(|id| *id < self.experts)?;
            Some((id, *weight))
        })
    }

    /// Returns the order of a rank's rows.
    #[must_use]
    pub fn layout(&self, rank: usize) -> Layout {
        let (mut offsets, mut sizes, mut rows) = (vec![0], Vec::new(), Vec::new());
        let mut tokens_of_experts = vec![Vec::new(); self.experts];
        for (source, tokens) in self.tokens.iter().enumerate() {
            for token in 0..*tokens {
                for (expert, _) in self.chosen(source, token) {
                    tokens_of_experts[expert].push((source, token));
                }
            }
        }
        let mut first = 0;
        for tokens in &tokens_of_experts[rank * self.local()..(rank + 1) * self.local()] {
            rows.extend(tokens.iter().enumerate().map(|(i, (s, t))| (first + i, *s, *t)));
            sizes.push(tokens.len() as u32);
            first += tokens.len().next_multiple_of(self.alignment);
            offsets.push(first as u32);
        }
        Layout { offsets, sizes, rows }
    }

    /// Returns what a rank's experts contribute to each token of each rank, in order: indices of
    /// rows, in the order of this [`layout`](Self::layout), and their weights.
    #[must_use]
    pub fn terms(&self, rank: usize, layout: &Layout) -> Vec<Vec<(u32, f32)>> {
        let (mut next, local) = (layout.offsets.clone(), self.local());
        let tokens = (0..).zip(&self.tokens).flat_map(|(rank, n)| (0..*n).map(move |t| (rank, t)));
        let terms = tokens.map(|(source, token)| {
            let here = self.chosen(source, token).filter(|(expert, _)| expert / local == rank);
            let row = here.map(|(expert, weight)| {
                let at = next[expert % local];
                next[expert % local] += 1;
                (at, weight)
            });
            row.collect()
        });
        terms.collect()
    }

    /// Returns the tokens of the rank `from` that have experts in the rank `to`.
    pub fn tokens_to(&self, from: usize, to: usize) -> impl Iterator<Item = usize> {
        let is_in_to = move |(expert, _): (usize, f32)| expert / self.local() == to;
        (0..self.tokens[from]).filter(move |token| self.chosen(from, *token).any(is_in_to))
    }

    /// Returns the number of rows that a rank receives from its peers: each token's row once.
    #[must_use]
    pub fn received(&self, rank: usize) -> usize {
        let peers = (0..self.tokens.len()).filter(|source| *source != rank);
        peers.map(|source| self.tokens_to(source, rank).count()).sum()
    }

    /// Returns how many elements of a rank's rows, in the order of its experts, are wrong.
    #[must_use]
    pub fn count_wrong_rows(&self, layout: &Layout, rows: &[bf16]) -> usize {
        let wrong = |(at, source, token): &(usize, usize, usize)| {
            let got = &rows[at * self.hidden..][..self.hidden];
            let want = self.row(*source, *token);
            // Most rows are right, and comparing bits is fast. Zeros may have either sign.
            if bits(got) == bits(want) {
                return 0;
            }
            got.iter().zip(want).filter(|(got, want)| got != want).count()
        };
        layout.rows.iter().map(wrong).sum()
    }

    /// Returns the contribution of the rank `at` to a token if expert `e` multiplies rows by
    /// `factor(e)`, a power of two of either sign: the bits that the kernels compute. `None` if the
    /// token has no expert in that rank.
    #[must_use]
    pub fn partial(
        &self,
        at: usize,
        (rank, token): (usize, usize),
        factor: impl Fn(usize) -> f32,
    ) -> Option<Vec<bf16>> {
        let local = self.local();
        let here = self.chosen(rank, token).filter(|(expert, _)| expert / local == at);
        let here: Vec<_> = here.map(|(expert, weight)| (factor(expert), weight)).collect();
        if here.is_empty() {
            return None;
        }
        let sum = |x: &bf16| {
            let terms = here.iter().map(|(factor, weight)| (x.to_f32() * factor, *weight));
            bf16::from_f32(terms.fold(0.0, |sum, (x, weight)| f32::mul_add(weight, x, sum)))
        };
        Some(self.row(rank, token).iter().map(sum).collect())
    }

    /// Returns the results for a rank's tokens, with `residual` if there is one.
    #[must_use]
    pub fn combined(
        &self,
        rank: usize,
        residual: Option<&[bf16]>,
        factor: impl Fn(usize) -> f32,
    ) -> Vec<bf16> {
        let mut results = Vec::new();
        for token in 0..self.tokens[rank] {
            let mut rows = Vec::new();
            for first in (0..self.tokens.len()).step_by(self.team.unwrap_or(1)) {
                let team = first..first + self.team.unwrap_or(1);
                let partials = team.filter_map(|at| self.partial(at, (rank, token), &factor));
                // Each team rounds its sum; for a team of one rank that is the rank's own result.
                let partials: Vec<_> = partials.collect();
                if !partials.is_empty() {
                    rows.push(self.sum(partials.iter().map(|row| &row[..])));
                }
            }
            let residual = residual.map(|all| &all[token * self.hidden..][..self.hidden]);
            let rows = rows.iter().map(|row| &row[..]).chain(residual);
            results.extend(self.sum(rows));
        }
        results
    }

    /// Returns the sum of rows, in f32, rounded once.
    fn sum<'a>(&self, rows: impl Iterator<Item = &'a [bf16]>) -> Vec<bf16> {
        let mut sums = vec![0.0; self.hidden];
        for row in rows {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x.to_f32());
        }
        sums.into_iter().map(bf16::from_f32).collect()
    }
}

/// Returns the nearest 8-bit float (E4M3), of two equally near ones the even one. Such a float has
/// an exponent of at least -6 and a fraction of three bits; the greatest one is 448.
fn e4m3(x: f64) -> f64 {
    let exponent = if x == 0.0 { -6.0 } else { x.abs().log2().floor().max(-6.0) };
    let step = (exponent - 3.0).exp2();
    if x.is_infinite() {
        return 448_f64.copysign(x);
    }
    ((x / step).round_ties_even() * step).clamp(-448.0, 448.0)
}

fn bits(row: &[bf16]) -> &[u16] {
    half::slice::HalfFloatSliceExt::reinterpret_cast(row)
}

/// Returns a number with few bits, so that its product with a power of two is exact. Some numbers
/// are zeros of either sign.
fn number(random: &mut fastrand::Rng) -> bf16 {
    let bits = random.u32(..);
    let value = ((bits & 0xff) as f32 - 128.0) / 64.0;
    bf16::from_f32(if bits >> 8 & 0xff == 0 { -0.0 } else { value })
}
