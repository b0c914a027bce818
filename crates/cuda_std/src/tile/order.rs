//! The order of a matrix's tiles.

/// Numbers the tiles of a matrix in groups of `GROUP` rows of tiles, column by column within a
/// group. Blocks that run at the same time then load the same few rows of one factor and columns of
/// the other, which stay in the L2 cache.
#[derive(Clone, Copy, Debug)]
pub struct TileOrder<const GROUP: u32> {
    /// Rows of tiles.
    pub rows: u32,
    /// Columns of tiles.
    pub columns: u32,
}

impl<const GROUP: u32> TileOrder<GROUP> {
    /// Returns the number of tiles.
    #[must_use]
    pub fn count(self) -> u32 {
        self.rows * self.columns
    }

    /// Returns the row and column of tile `number`, in tiles.
    #[must_use]
    pub fn position(self, number: u32) -> (u32, u32) {
        // The divisors are at least 1, so that no code tests them for 0.
        let in_group = (GROUP * self.columns).max(1);
        let (group, rest) = (number / in_group, number % in_group);
        let left = self.rows - group * GROUP;
        let height = left.clamp(1, GROUP);
        (group * GROUP + rest % height, rest / height)
    }
}

#[cfg(test)]
mod tests;
