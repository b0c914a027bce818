//! Which collective is measured.

/// A collective.
#[derive(Clone, Copy, PartialEq)]
pub enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    AllToAll,
    /// An all-to-all whose messages to every second rank are half as long as the others.
    AllToAllV,
}

impl Operation {
    /// Returns its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all-reduce",
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all-to-all",
            Self::AllToAllV => "all-to-all-v",
        }
    }

    /// Returns whether its speed depends on the type.
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }

    /// Returns the chunks of the buffers to send and to receive in.
    pub fn chunks(self, ranks: usize) -> [usize; 2] {
        match self {
            Self::AllReduce | Self::Broadcast => [1, 1],
            Self::AllGather => [1, ranks],
            Self::ReduceScatter => [ranks, 1],
            Self::AllToAll => [ranks, ranks],
            Self::AllToAllV => [ranks.next_multiple_of(2); 2],
        }
    }

    /// Returns the bus bandwidth over the algorithm bandwidth, as nccl-tests defines them.
    pub fn bus(self, ranks: usize) -> f64 {
        match self {
            Self::AllReduce => 2.0 * (ranks - 1) as f64 / ranks as f64,
            Self::Broadcast => 1.0,
            _ => (ranks - 1) as f64 / ranks as f64,
        }
    }
}
