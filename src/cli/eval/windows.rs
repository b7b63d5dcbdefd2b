//! Which tokens of a text are put through the model together, and which of those are scored: the rules of
//! llama-perplexity.
//!
//! Without a stride windows do not overlap and the second half of each is scored, so that every token that is scored has at
//! least half a window before it. With a stride of S each window begins S tokens behind the one before, is S/2 tokens longer
//! than was asked for, and its last S tokens are scored.

/// A text in windows of one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    ids: Vec<u32>,
    /// Tokens of a window.
    pub length: usize,
    /// Tokens from the beginning of one to that of the next.
    pub step: usize,
    /// Windows there are.
    pub count: usize,
    /// The first position whose logits are scored, by the token that follows it.
    pub first: usize,
}

/// Why a text makes no window.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// It is too short.
    #[error("the text has {tokens} tokens, and a window {window}")]
    Short {
        /// Tokens it has.
        tokens: usize,
        /// Tokens of a window.
        window: usize,
    },
    /// Nothing of a window would be scored.
    #[error("of a window of {window} tokens the first {first} are read only, which leaves none to be predicted")]
    NothingScored {
        /// Tokens of a window.
        window: usize,
        /// Tokens that are read only.
        first: usize,
    },
    /// More is scored than a window has.
    #[error("a stride of {stride} is longer than a window of {window} tokens, and would leave tokens out")]
    Stride {
        /// What was asked for.
        stride: usize,
        /// Tokens of a window.
        window: usize,
    },
}

impl Windows {
    /// Windows of `length` tokens one behind the other, of which the first `first` positions are read only; half of them
    /// where that is not given.
    pub fn plain(ids: Vec<u32>, length: usize, first: Option<usize>) -> Result<Windows, Unfit> {
        let first = first.unwrap_or(length / 2);
        let count = ids.len().checked_div(length).unwrap_or(0);
        Windows { ids, length, step: length, count, first }.checked()
    }

    /// Windows that overlap.
    pub fn strided(ids: Vec<u32>, length: usize, stride: usize) -> Result<Windows, Unfit> {
        let window = length + stride / 2;
        if stride == 0 || stride >= window {
            return Err(Unfit::Stride { stride, window });
        }
        // The last window ends before the text does, as it does there.
        let count = ids.len().saturating_sub(window).div_ceil(stride);
        Windows { ids, length: window, step: stride, count, first: window - stride - 1 }.checked()
    }

    fn checked(self) -> Result<Windows, Unfit> {
        let Windows { length: window, first, .. } = self;
        if first + 2 > window {
            return Err(Unfit::NothingScored { window, first });
        }
        if self.count == 0 {
            return Err(Unfit::Short { tokens: self.ids.len(), window });
        }
        Ok(self)
    }

    /// The first `most` of them.
    pub fn take(self, most: Option<usize>) -> Windows {
        Windows { count: self.count.min(most.unwrap_or(usize::MAX)), ..self }
    }

    /// The ids of one.
    pub fn at(&self, number: usize) -> &[u32] {
        &self.ids[number * self.step..][..self.length]
    }

    /// Tokens of each that are scored.
    pub fn scored(&self) -> usize {
        self.length - 1 - self.first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(count: u32) -> Vec<u32> {
        (0..count).collect()
    }

    #[test]
    fn the_second_half_of_each_window_is_scored() {
        // As perplexity.cpp has it: first = n_ctx / 2, and n_ctx - first - 1 tokens of each chunk.
        let windows = Windows::plain(ids(1300), 512, None).unwrap();
        assert_eq!((windows.count, windows.first, windows.scored()), (2, 256, 255));
        assert_eq!((windows.at(1)[0], windows.at(1)[511]), (512, 1023));
        assert_eq!(Windows::plain(ids(7), 7, None).unwrap().scored(), 3);
        let all = Windows::plain(ids(20), 10, Some(0)).unwrap();
        assert_eq!((all.count, all.scored()), (2, 9));
        assert_eq!((all.clone().take(Some(1)).count, all.clone().take(Some(9)).count, all.take(None).count), (1, 2, 2));
    }

    #[test]
    fn a_stride_scores_the_last_tokens_of_longer_windows() {
        // perplexity_v2: n_ctx += stride / 2, (tokens - n_ctx + stride - 1) / stride chunks, j from n_ctx - stride - 1 on.
        let windows = Windows::strided(ids(1000), 512, 100).unwrap();
        assert_eq!((windows.length, windows.count, windows.first, windows.scored()), (562, 5, 461, 100));
        assert_eq!((windows.at(4)[0], windows.at(4)[561]), (400, 961));
        // What one window scores ends where the next one's begins.
        let ends: Vec<u32> = (0..5).map(|n| windows.at(n)[windows.length - 1]).collect();
        let begins: Vec<u32> = (0..5).map(|n| windows.at(n)[windows.first + 1]).collect();
        assert!(ends.iter().zip(&begins[1..]).all(|(end, begin)| end + 1 == *begin), "{begins:?} {ends:?}");
        assert_eq!(Windows::strided(ids(562), 512, 100), Err(Unfit::Short { tokens: 562, window: 562 }));
        for stride in [0, 20] {
            let window = 10 + stride / 2;
            assert_eq!(Windows::strided(ids(99), 10, stride), Err(Unfit::Stride { stride, window }));
        }
    }

    #[test]
    fn what_makes_no_window_says_why() {
        assert_eq!(Windows::plain(ids(511), 512, None), Err(Unfit::Short { tokens: 511, window: 512 }));
        assert_eq!(Windows::plain(ids(9), 4, Some(3)), Err(Unfit::NothingScored { window: 4, first: 3 }));
        for length in [0, 1] {
            assert!(matches!(Windows::plain(ids(9), length, None), Err(Unfit::NothingScored { .. })));
        }
    }
}
